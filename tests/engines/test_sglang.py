"""Real SGLang against the trainer, transformers and the HF engine: laws 3, 5 and 6, and the Engine contract.

Three engines are started in all: one beside a policy in one process (`sglang_probe.py`), one over two ranks, and one to
be killed.
"""

import json
import time
from dataclasses import replace

import psutil
import pytest

from spmdrl.config import checks, engines
from spmdrl.config.fields import ConfigError
from spmdrl.config.schema import Config
from tests.builds import no_sglang
from tests.e2e.runner import GONE_WITHIN, Job, argv, metrics, run, succeed
from tests.engines.probe import long_prompts, random_qwen2

pytestmark = pytest.mark.timeout(300)
installed = pytest.mark.skipif(bool(no_sglang()), reason=no_sglang())
FP32 = 1e-4
"""Largest |dlogp| in float32: engine, transformers, trainer, HF engine."""
FP64 = 1e-12
"""The same of trainer and transformers in float64."""
STEPS = 3


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("facts") / "facts.json"
    ended = run([file], 280, module="tests.engines.sglang_probe")
    assert ended.rc == 0 and file.exists(), ended.show()
    measured = json.loads(file.read_text())
    assert "failed" not in measured, f"{measured['failed']}\n{ended.show()}"
    assert measured["engine"] == "SGLangEngine" and not ended.left, ended.show()
    return measured


@installed
def test_parity_of_engine_trainer_and_transformers_after_each_of_5_updates(facts):
    """All three agree to FP32 on every token, and each with what float64 gives."""
    assert [row["version"] for row in facts["agreement"]] == [0, 1, 2, 3, 4, 5]
    assert facts["moved"] > 1e-3, "the updates must have changed the weights"
    for row in facts["agreement"]:
        assert row["tokens"] >= 40 and row["spread"] > 0.1, f"samples that are all alike prove nothing: {row}"
        for pair in ("engine_hf", "trainer_hf"):
            assert row[pair] < FP32, row
        for name in ("engine_trainer_tokens", "engine_exact_tokens", "trainer_exact_tokens"):
            assert max(row[name]) < FP32, row
        assert row["trainer_hf_exact"] < FP64, row


@installed
@pytest.mark.parametrize("kind", ["greedy", "T 1", "T 1.7", "top-p"])
def test_parity_of_samples_with_the_hf_engine(facts, kind):
    """Greedy tokens agree and, with the same seeds, drawn ones: both engines draw by the same numbers."""
    found = facts["samples"][kind]
    assert found["same"] == 16 and found["logp"] < FP32, found
    assert found["different"] > 8 and "stop" in found["finish"], found


@installed
def test_seeded_sample_does_not_depend_on_its_neighbours(facts):
    assert facts["neighbours"]["same"] == facts["neighbours"]["of"] == 8 and facts["neighbours"]["logp"] < FP32
    assert facts["neighbours"]["different"] > 1, "another seed draws other tokens"


@installed
def test_stale_engine_refuses(facts):
    stale = facts["stale"]
    told = "StaleEngineError: the engine holds weight version 6, the trainer is at version 7: push"
    assert stale["trainer ahead"].startswith(told)
    assert stale["asleep"].startswith("StaleEngineError") and "wake" in stale["asleep"]
    assert stale["after level 1"] == "no error", "level 1 keeps the weights"
    assert stale["version after level 2"] is None
    assert stale["after level 2"].startswith("StaleEngineError: the engine holds no weights")
    assert stale["level 2 on top of level 1"] is None
    assert stale["after a push"] == "no error"


@installed
@pytest.mark.parametrize("case", ["turned bit", "turned in memory", "lost tensor"])
def test_stale_after_a_corrupt_push(facts, case):
    corrupt = facts["corrupt"]
    told, version, submit = corrupt[case]
    assert told.startswith("CorruptWeightsError"), told
    assert {"turned in memory": corrupt["name in memory"]}.get(case, "the engine's memory does not contain") in told
    assert version is None and submit.startswith("StaleEngineError: the engine holds no weights")
    assert corrupt["mended"] == "no error" and corrupt["agreement after"]["engine_hf"] < FP32, corrupt


@installed
def test_a_request_longer_than_the_context_is_refused_and_leaves_nothing(facts):
    facts = facts["limits"]
    longest = facts["longest"]
    told = f"ValueError: request (0, 0) has {longest - 3} prompt tokens and asks for up to 4 new ones"
    assert facts["one more"].startswith(told) and f"longest sequence is {longest}" in facts["one more"], facts
    assert facts["aborted"] == [] and facts["whole"][0] == 3, "the last position is taken too"
    assert longest == 128, "what the model's positions hold, not what the settings ask for"


@installed
def test_stale_after_an_interrupted_push(facts):
    facts = facts["interrupted"]
    assert facts["push"] == "ConnectionError: the other node is gone" and facts["version"] is None
    for case in ("refuses", "refuses the old one"):
        assert facts[case].startswith("StaleEngineError: the engine holds no weights"), facts
    assert facts["mended"]["engine_hf"] < FP32, facts


@installed
def test_sleep_gives_memory_back(facts):
    slept = facts["sleep_memory"]
    (weights, cache), *later = slept["held"]
    assert weights > 2 << 20 and abs(cache - (256 << 20)) < 1 << 20, slept
    assert later == [[weights, 0], [0, 0], [weights, cache]], "level 1 keeps the weights on a CPU, level 2 does not"
    awake, asleep, again = slept["mapped"]
    assert awake - asleep > 250 and abs(again - awake) < 10, slept
    assert slept["same"] and slept["same after level 2"] and len(set(map(tuple, slept["greedy"]))) > 3, slept


@installed
def test_abort_returns_the_tokens_so_far(facts):
    abort = facts["abort"]
    assert [key for key, *_ in abort["cut"]] == [[0, 0], [1, 0], [4, 0]]
    for (position, _), finish, tokens, logp, version in abort["cut"]:
        whole = abort["whole"][position]
        assert finish == "abort" and version == abort["version"] and 0 < len(tokens) == len(logp) < len(whole[1])
        assert tokens == whole[1][: len(tokens)], "the request's own tokens, as it draws them when it is not cut off"
        assert logp == pytest.approx(whole[2][: len(tokens)], abs=FP32)
    assert len(abort["cut"][2][2]) == 1, "what had ended by itself is cut off before its last token"
    assert abort["others"] == [[2, 0], [3, 0]] and abort["again"] == abort["left"] == 0
    assert abort["after"] == "no error"


@installed
def test_engine_leaves_the_process_as_it_was_and_nothing_behind(facts):
    assert facts["rng_untouched"] and facts["local_world_size"] == "3"
    assert facts["left behind"] == []


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list:
    """A model with its own output head and one KV head, which two ranks both hold; prompts of hundreds of tokens, each
    asked four times in every step, so that prefixes are cached."""
    folder = tmp_path_factory.mktemp("random")
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count('a') / 8\n"
    )
    model, prompts = random_qwen2(folder / "model"), long_prompts(folder / "long.jsonl")
    return [
        *argv(
            f"--run.steps {STEPS} --rollout.prompts_per_step 8 --rollout.samples_per_prompt 4 --eval.every 0 "
            "--rollout.max_prompt_tokens 400 --rollout.max_new_tokens 12 --optimizer.lr 5e-3 "
            # Without it AdamW makes a whole step of the rounding of a gradient that is 0.
            "--optimizer.eps 1e-4 --checkpoint.no-at-end "
            "--tracking.trackers jsonl --run.timeout 60 --rollout.assignment static"
        ),
        *["--model.path", model, "--data.train", prompts, "--reward.function", reward],
    ]


@pytest.fixture(scope="module")
def runs(flags, tmp_path_factory) -> dict:
    """Returns metrics.jsonl of the HF engine on one rank, and of SGLang over two, whose weights come by broadcast."""
    out = {}
    for name, ranks, more in (("hf", 0, "hf"), ("tp 2", 2, "sglang --rollout.tp 2 --rollout.sglang_push broadcast")):
        folder = tmp_path_factory.mktemp("run")
        succeed([*flags, "--rollout.engine", *argv(more), "--run.dir", folder], 120, ranks=ranks)
        out[name] = metrics(folder)
    return out


@installed
def test_layout_of_the_engine_does_not_change_the_run(runs):
    assert [row["step"] for row in runs["tp 2"]] == list(range(1, STEPS + 1))
    for one, other in zip(runs["hf"], runs["tp 2"], strict=True):
        # A prefix cached before a push would be off by 100 times as much and more.
        assert 0 < other["logp_diff/max"] < FP32, other
        for name in ("reward/mean", "response_length/mean"):
            assert other[name] == one[name], (name, one, other)
        for name in ("loss", "entropy/mean", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (name, one, other)


@installed
def test_killed_engine_is_named_by_the_next_call(facts):
    assert facts["killed"].startswith("EngineDiedError: the SGLang engine (process"), facts["killed"]
    assert "SIGKILL" in facts["killed"] and "scheduler" in facts["killed"] and "\n" not in facts["killed"]


@installed
def test_killed_engine_ends_the_job_while_its_rank_is_busy(flags, tmp_path):
    """The scheduler dies while the rank waits for a reward for up to a minute: nothing calls the engine meanwhile."""
    reward, graded = tmp_path / "reward.py", tmp_path / "graded"
    reward.write_text(
        "import pathlib, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    pathlib.Path({str(graded)!r}).touch()\n"
        "    time.sleep(60)\n"
        "    return 0.0\n"
    )
    job = Job(
        [*flags, *argv("--rollout.engine sglang --reward.timeout 90 --reward.function"), reward, "--run.dir", tmp_path]
    )
    try:
        job.wait_for(graded.exists, 100, "a first grading")
        time.sleep(2)
        # A scheduler's title is written over its environment, where the job's mark was.
        tree = psutil.Process(job.process.pid).children(recursive=True)
        dead = time.time()
        next(process for process in tree if "scheduler" in process.name()).kill()
        ended = job.wait(60)
    finally:
        job.kill()
    left = [process for process in psutil.wait_procs(tree, timeout=1)[1] if process.status() != psutil.STATUS_ZOMBIE]
    assert ended.rc == 1 and not ended.left and not left, ended.show()
    assert len(ended.messages) == 1, ended.show()
    assert "rank 0" in ended.messages[0] and "EngineDiedError: the SGLang engine" in ended.messages[0], ended.show()
    assert ended.ended - dead < GONE_WITHIN, ended.show()


def test_missing_sglang_is_named_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(engines, "sglang_python", lambda: None)
    config = replace(Config(), rollout=replace(Config().rollout, engine="sglang"))
    with pytest.raises(ConfigError, match=r"--rollout.engine sglang: .* ./launch/install.sh --sglang"):
        checks.check(config, 1)
