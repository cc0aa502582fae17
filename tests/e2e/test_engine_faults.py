"""Faults around an engine: it does not fit the model, dies while it samples, disagrees with the trainer.

Law 6: one message with rank, phase and cause, or with the flag to change, and the whole job gone within 10 s.
"""

import json
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._models import tiny_mixture
from spmdrl.engines.build import check_engine
from spmdrl.engines.engine import Request, kv_bytes_per_token
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.hub.folder import TINY
from spmdrl.spmd.world import World
from tests.e2e.runner import GONE_WITHIN, Ended, Job, argv, metrics
from tests.e2e.warm import run, succeed
from tests.ranks.cases import config, push_folder

pytestmark = pytest.mark.timeout(240)
with_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
VLLM = pytest.param("vllm", marks=with_vllm)
QUICK = argv(
    "--rollout.engine hf --run.steps 2 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
    "--tracking.trackers jsonl --run.timeout 30"
)
LONG = argv(
    "--rollout.engine hf --run.steps 2 --rollout.prompts_per_step 2048 --rollout.samples_per_prompt 8 "
    "--rollout.max_sequences 16 --rollout.max_new_tokens 60 --rollout.temperature 2 --eval.every 0 "
    "--tracking.trackers jsonl --run.timeout 60"
)
"""Settings with which one step samples for minutes."""


def refused(ended: Ended, *words: str) -> str:
    """Returns the one message of a job that ended by itself with nothing left."""
    assert ended.rc != 0 and not ended.left, ended.show()
    assert len(ended.messages) == 1, ended.show()
    message = ended.ours[ended.ours.index(ended.messages[0]) :]
    for word in words:
        assert word in message, f"{word!r} is not in the message\n{ended.show()}"
    assert ended.ended - ended.stamp(ended.messages[0]) < GONE_WITHIN, ended.show()
    return message


def model_of(folder: Path, **changes) -> Path:
    """Makes a copy of the tiny policy with another config.json, which is enough for checks before a model is built."""
    shutil.copytree(TINY, folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# ── an engine that does not fit the model ────────────────────────────────────


@pytest.mark.parametrize("engine", ["hf", VLLM, "sglang"])
@pytest.mark.parametrize(
    ("tp", "changes", "fits"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (3, {}, {"hf": "1, 2", "vllm": "1, 2, 4", "sglang": "1, 2, 4"}),
        # KV heads are copied where there are more ranks than those, but not by the hf engine.
        (4, {}, {"hf": "1, 2"}),
        (8, {}, {"hf": "1, 2", "vllm": "1, 2, 4", "sglang": "1, 2, 4"}),
        (
            2,
            {"num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 510},
            dict.fromkeys(("hf", "vllm", "sglang"), "1, 5"),
        ),
        (2, {"num_key_value_heads": 1}, {"hf": "1"}),
        (4, {"num_key_value_heads": 4, "intermediate_size": 510}, dict.fromkeys(("hf", "vllm", "sglang"), "1, 2")),
    ],
)
def test_bad_tp_names_the_heads_and_what_fits(engine, tp, changes, fits, tmp_path):
    folder = model_of(tmp_path / "model", **changes)
    cfg = config(model={"path": str(folder)}, rollout={"engine": engine, "tp": tp})
    if engine not in fits:
        check_engine(cfg, True)
        return
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512} | changes
    with pytest.raises(ValueError) as error:
        check_engine(cfg, True)
    message = str(error.value)
    assert message.startswith(f"--rollout.tp {tp}: {folder} has {heads['num_attention_heads']} attention heads and ")
    assert f"{heads['num_key_value_heads']} key-value heads" in message
    assert message.endswith(f"which {tp} ranks cannot share; {engine} takes {fits[engine]}") and "\n" not in message
    assert (f"MLPs {heads['intermediate_size']} wide" in message) == (heads["intermediate_size"] % tp > 0)


@pytest.mark.parametrize("engine", [VLLM, "sglang"])
def test_bad_expert_layout_names_the_experts(engine, tmp_path):
    tp, tiny = {"tp": 2}, str(model_of(tmp_path / "dense"))
    for layout, flag in (({"ep": 2} | tp, "--rollout.ep 2"), ({"dp": 2, "ep": 1}, "--rollout.dp 2")):
        with pytest.raises(ValueError, match=rf"^{flag}: this setting divides experts, and {tiny} has none; take 1$"):
            check_engine(config(model={"path": tiny}, rollout={"engine": engine} | layout), True)
    folder = tiny_mixture(tmp_path / "mixture")
    told = rf"^--rollout.ep 3: {folder} has 8 experts, which 3 ranks cannot divide equally; change --rollout.tp"
    with pytest.raises(ValueError, match=told):
        check_engine(config(model={"path": str(folder)}, rollout={"engine": engine, "dp": 3, "ep": 3}), True)
    check_engine(config(model={"path": str(folder)}, rollout={"engine": engine, "ep": 4, "dp": 2} | tp), True)


def test_bad_tp_ends_the_job_before_an_engine_is_built(tmp_path):
    folder = model_of(tmp_path / "model", num_attention_heads=3, num_key_value_heads=3)
    ended = run(
        [*QUICK, *argv("--rollout.tp 2 --model.path"), str(folder), "--run.dir", tmp_path / "run"], 100, ranks=2
    )
    message = refused(ended, "phase start", "ValueError: --rollout.tp 2:", "3 attention heads", "hf takes 1")
    assert "Traceback" not in ended.ours and len(message.splitlines()) == 1, ended.show()
    assert not any(line.startswith(("building", "starting")) for line in ended.out), ended.show()


def test_bad_placement_without_a_rank_to_train_is_one_message(tmp_path):
    flags = argv("--parallel.placement split --parallel.rollout_ranks 2")
    ended = run([*QUICK, *flags, "--run.dir", tmp_path / "run"], 100, ranks=2)
    refused(ended, "1 setting to change", "--parallel.rollout-ranks 2", "leave no rank to train (the job has 2)")
    assert not (tmp_path / "run").exists()


@with_vllm
@pytest.mark.parametrize(
    ("sections", "flag"),
    [
        ({"rollout": {"temperature": 2.5}}, "--rollout.temperature 2.5"),
        ({"rollout": {"temperature": 0.001}}, "--rollout.temperature 0.001"),
        ({"eval": {"temperature": 3.0}}, "--eval.temperature 3"),
    ],
)
def test_bad_temperature_of_an_engine_is_found_at_the_start(sections, flag, monkeypatch):
    """vLLM refuses higher temperatures only when it is asked to sample, and silently raises lower ones."""
    monkeypatch.setattr("spmdrl.engines.build.vllm_wants_gpu", lambda: False)
    sections["rollout"] = sections.get("rollout", {}) | {"engine": "vllm"}
    with pytest.raises(ValueError, match=f"{flag}: vllm takes 0.01 to 2"):
        check_engine(config(**sections), True)
    sections["rollout"]["engine"] = "hf"
    check_engine(config(**sections), True)
    check_engine(config(rollout={"engine": "vllm", "temperature": 2.0}, eval={"temperature": 0.0}), True)


# ── a KV cache that is too small, or larger than the machine ─────────────────


def kv_config(gib: float, engine: str, **rollout):
    return config(
        rollout={"engine": engine, "kv_cache_gib": gib, "max_prompt_tokens": 60, "max_new_tokens": 40} | rollout,
    )


@pytest.mark.parametrize(
    ("engine", "on_cpu", "tp", "tokens"),
    # vLLM holds whole blocks and one more; SGLang a few tokens more.
    [
        *(pytest.param("vllm", *case, marks=with_vllm) for case in ((True, 1, 160), (True, 4, 160), (False, 1, 128))),
        ("sglang", True, 2, 108),
    ],
)
def test_bad_kv_cache_too_small_for_one_sequence_names_the_least_that_does(engine, on_cpu, tp, tokens, monkeypatch):
    monkeypatch.setattr("spmdrl.engines.build.vllm_wants_gpu", lambda: False)
    model = json.loads((TINY / "config.json").read_text())
    heads = max(1, model["num_key_value_heads"] // tp)
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    need = tokens * 2 * 4 * heads * head_dim * model["num_hidden_layers"]
    with pytest.raises(ValueError) as error:
        check_engine(kv_config(1e-5, engine, tp=tp), on_cpu)
    message = str(error.value)
    assert message.startswith("--rollout.kv-cache-gib 1e-05: one sequence of 100 tokens takes ") and "\n" not in message
    least = float(message.split("give at least ")[1].split(",")[0])
    assert need <= least * 2**30 < need + 1100
    check_engine(kv_config(least, engine, tp=tp), on_cpu)
    with pytest.raises(ValueError, match="give at least"):
        check_engine(kv_config((need - 1) / 2**30, engine, tp=tp), on_cpu)


@pytest.mark.parametrize("engine", [VLLM, "sglang"])
def test_bad_kv_cache_larger_than_the_machine_names_what_is_free(engine):
    with pytest.raises(
        ValueError, match=r"^--rollout.kv-cache-gib 90000: only [\d.]+ GiB of memory are free; give less$"
    ):
        check_engine(kv_config(90000.0, engine), True)
    # GPU memory is not the machine's memory, and the hf engine has no cache of a size.
    check_engine(kv_config(90000.0, engine), False)
    for gib in (90000.0, 1e-5):
        check_engine(kv_config(gib, "hf"), True)


def test_kv_bytes_of_latent_and_of_linear_attention():
    from transformers import DeepseekV3Config, Qwen3NextConfig

    latent = DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16)
    assert kv_bytes_per_token(latent, "bfloat16", 8) == 3 * (512 + 64) * 2, "whole on every rank"
    mixed = Qwen3NextConfig(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    assert mixed.layer_types.count("full_attention") == 2
    assert kv_bytes_per_token(mixed, "float32", 1) == 2 * 2 * 2 * 64 * 4


def test_bad_kv_cache_ends_the_job_before_an_engine_is_built(tmp_path):
    ended = run(
        [*QUICK, *argv("--rollout.engine vllm --rollout.kv-cache-gib 0.00001 --run.dir"), tmp_path / "run"], 100
    )
    refused(ended, "phase start", "ValueError: --rollout.kv-cache-gib 1e-05:", "give at least 0.00")
    assert "Traceback" not in ended.ours and not any(line.startswith("building") for line in ended.out), ended.show()


# ── a request, and a model, of fewer positions ───────────────────────────────


def test_bad_request_longer_than_the_context_is_refused_by_submit():
    """The hf engine refuses it here; vLLM and SGLang are asked the same in tests/engines."""
    cfg = config(rollout={"max_prompt_tokens": 10, "max_new_tokens": 6})
    nothing: list[Any] = [None] * 9
    engine = HFEngine(cfg, World(0, 1, 0, torch.device("cpu"), *nothing), {2})
    push_folder(engine, TINY)
    with pytest.raises(ValueError, match=r"request \(0, 0\) has 11 prompt tokens and asks for up to 6 .* 16:"):
        engine.submit(Request((0, 0), [5] * 11, 1, 0, 6))
    assert not engine.waiting and engine.poll() == [] and engine.abort([(0, 0)]) == []
    engine.submit(Request((1, 0), [5] * 10, 1, 0, 6, temperature=0.0))
    done = [c for _ in range(6) for c in engine.poll()]
    assert [c.key for c in done] == [(1, 0)]


def test_a_model_of_fewer_positions_than_the_settings_samples_inside_of_them(tmp_path):
    """With 128 positions and up to 100 new tokens, 28 are left for a prompt, whatever max_prompt_tokens says."""
    data = tmp_path / "data.jsonl"
    # A prompt gets two tokens of its own: begin and end of the question.
    table = [{"prompt": "abc=", "answer": "cba"}, {"prompt": "abcdefghij" * 4 + "=", "answer": "x"}] * 4
    data.write_text("".join(json.dumps(row) + "\n" for row in table))
    flags = [*argv("--rollout.max_prompt_tokens 400 --data.train"), data]
    ended = succeed(
        [*QUICK, *flags, *argv("--run.steps 1 --rollout.max_new_tokens 100 --run.dir"), tmp_path / "run"], 100
    )
    assert f"4 prompts from {data}, 4 longer than 28 tokens dropped" in ended.out, ended.show()
    (row,) = metrics(tmp_path / "run")
    assert row["response_length/max"] <= 100 and row["logp_diff/mean"] < 1e-4, row
    ended = run([*QUICK, *flags, *argv("--rollout.max_new_tokens 128 --run.dir"), tmp_path / "none"], 100)
    refused(ended, "--rollout.max-new-tokens 128 leaves no room for a prompt", "reads at most 128 tokens")


# ── an engine that dies while it samples ─────────────────────────────────────

REWARD = """
import os, pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pathlib.Path({stamp!r}).touch()
    return float(solution_str == ground_truth)
"""


@pytest.mark.parametrize(
    ("flags", "victim", "phase"),
    [
        ("", 1, "rollout"),
        ("--parallel.placement split --parallel.rollout_ranks 1", 1, "exchange"),
        ("--parallel.placement split --parallel.rollout_ranks 1 --rollout.staleness 1", 0, "rollout"),
    ],
    ids=["a rank of two", "the one that samples while the other waits", "the one that trains while the other samples"],
)
def test_killed_rank_in_the_middle_of_sampling_ends_the_job(flags, victim, phase, tmp_path):
    """First gradings are there and thousands of samples are not; the rank that is left names its place."""
    reward, stamp, folder = tmp_path / "reward.py", tmp_path / "stamp", tmp_path / "run"
    reward.write_text(REWARD.format(stamp=str(stamp)))
    job = Job([*LONG, *argv(flags), "--reward.function", reward, "--run.dir", folder], ranks=2)
    try:
        job.wait_for(stamp.exists, 100, "a first grading")
        killed_at = time.time()
        job.rank(victim).kill()
        ended = job.wait(60)
    finally:
        job.kill()
    assert not ended.timed_out and ended.ended - killed_at < GONE_WITHIN, ended.show()
    other = 1 - victim
    message = refused(ended, f"rank {other} on ", f"in phase {phase}:")
    first = message.splitlines()[0]
    assert "SIGTERM" in first and "another rank is lost" in first, ended.show()
    told = "\n".join(ended.err)
    assert "Signal 9 (SIGKILL)" in told and f"rank      : {victim} " in told.split("Root Cause")[1], ended.show()
    log = (folder / "logs" / f"rank_{other}.log").read_text()
    assert f"in phase {phase}" in log, log
    assert metrics(folder) == [], "no step was finished"


def test_failing_engine_is_named_with_rank_phase_and_cause(tmp_path):
    """The engine of one rank raises in the middle of its samples."""
    ended = run([*LONG, "--run.dir", tmp_path / "run"], 100, ranks=2, module="tests.e2e.test_engine_faults")
    refused(ended, "rank 1 on ", "failed in phase rollout: RuntimeError: the engine's memory is gone")
    raised = float((tmp_path / "run" / "raised").read_text())
    assert ended.ended - raised < GONE_WITHIN, ended.show()
    log = (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert "failed in phase rollout" in log and "in broken_poll" in log, "its own story, with the traceback"


def main() -> None:
    """Runs `spmdrl.train` with an hf engine that fails on rank 1 at its 30th step."""
    import os

    from spmdrl import train
    from spmdrl.session.launch import launch

    poll, polls = HFEngine.poll, []

    def broken_poll(self):
        polls.append(1)
        if os.environ["RANK"] == "1" and len(polls) == 30:
            (Path(sys.argv[-1]) / "raised").write_text(repr(time.time()))
            raise RuntimeError("the engine's memory is gone")
        return poll(self)

    HFEngine.poll = broken_poll
    launch(train.JOB)


# ── an engine that disagrees with the trainer ────────────────────────────────


def test_a_disagreeing_engine_ends_the_job_and_its_step_is_written_down(tmp_path):
    flags = argv("--rollout.quantization int8 --rollout.logp-diff-stop 1e-9 --checkpoint.every 1")
    ended = run([*QUICK, *flags, "--run.dir", tmp_path / "run"], 100)
    message = refused(ended, "step 1: |logp of engine - logp of trainer| is ", "--rollout.logp-diff-stop 1e-09")
    assert "--rollout.quantization int8" in message and "Traceback" not in ended.ours, ended.show()
    (row,) = metrics(tmp_path / "run")
    assert row["step"] == 1 and 1e-5 < row["logp_diff/mean"] <= row["logp_diff/max"], row
    assert f"is {row['logp_diff/mean']:.4g} in the mean" in message
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*")), "what it learnt is not kept"


def test_a_disagreeing_engine_is_warned_of_and_corrected(tmp_path):
    flags = argv("--rollout.quantization int8 --rollout.logp-diff-warn 1e-9 --rollout.logp-diff-stop 0")
    ended = succeed([*QUICK, *flags, "--run.dir", tmp_path / "run"], 100)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all(row["logp_diff/mean"] > 1e-5 for row in rows), rows
    warnings = [line for line in ended.out if line.startswith("warning: step ")]
    assert len(warnings) == 2 and "--rollout.logp-diff-warn 1e-09" in warnings[0], ended.show()
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert log.count("WARNING spmdrl: step ") == 2, log


if __name__ == "__main__":
    main()
