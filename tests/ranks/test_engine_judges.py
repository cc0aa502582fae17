"""Judges on the run's own engine: whose weights sample when, and who is asked what, on any number of ranks."""

import json
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmdrl.engines.engine import Completion, check_version
from spmdrl.health.preempt import PreemptedError, Request, preemption
from spmdrl.rewards.judge_engine import EngineAsker
from spmdrl.rl.build import build_run
from spmdrl.rl.engine_judges import askers
from spmdrl.session.session import Session
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import config, small_model
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.unit.judge_stand_in import written

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS = 2
VERDICT = 96
"""Most tokens of a verdict, by which a request of a judge is known."""


def byte_tokenizer(template: str | None):
    """One token for each byte, in the form that transformers takes for a Qwen2."""
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    vocab = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(vocab)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=special[3:], **names)
    found.chat_template = template
    return found


def model(folder: Path, seed: int, template: str | None = TEMPLATE, **changes) -> str:
    """A small model that reads bytes."""
    tokenizer = byte_tokenizer(template)
    values: dict = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096} | changes
    small_model(folder, seed, **values)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """Policy and judge."""
    base = tmp_path_factory.mktemp("models")
    return model(base / "policy", 0), model(base / "judge", 1)


def judged(tmp_path: Path, name: str = "judge", **settings) -> str:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    given = {"max_new_tokens": VERDICT, "max_prompt_tokens": 3900, "retries": 1} | settings
    file = Path(written(folder, **given))
    return str(file.rename(folder / f"{name}.yaml"))


def settings(tmp_path: Path, policy: str, **sections) -> dict:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(12)))
    base = {
        "run": {"steps": STEPS, "seed": 3},
        "model": {"path": policy, "dtype": "float64"},
        "optimizer": {"lr": 1e-2},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 3,
            "max_new_tokens": 6,
            "max_prompt_tokens": 16,
            "assignment": "static",
        },
        "algo": {"updates_per_step": 1, "kl_coef": 0.0},
        "policy": {"max_tokens_per_microbatch": 512},
        "eval": {"every": 1, "prompts": 4, "samples": 2},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": ("jsonl",)},
        "data": {"train": str(rows), "eval": str(rows), "chat": "off"},
    }
    return {name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()}


class Watched:
    """An engine whose requests and completions are kept; it writes verdicts itself where `says` is given."""

    def __init__(self, engine, tokenizer, says=None):
        self.engine, self.tokenizer, self.says = engine, tokenizer, says
        self.asked: dict = {}
        self.seen: list[tuple] = []
        """(version, prompt, tokens, logp) of each completion."""
        self.spoken: list[Completion] = []
        self.order: list[int] = []
        """Versions of requests, in their order."""

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        self.asked[request.key] = request
        self.order.append(request.version)
        if self.says is None or request.max_new_tokens != VERDICT:
            self.engine.submit(request)
            return
        check_version(request.version, self.engine.version)
        text = self.says(self.tokenizer.decode(request.prompt))
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        self.spoken.append(Completion(request.key, tokens, [0.0] * len(tokens), "stop", request.version))

    def poll(self):
        if self.spoken:
            return [self.spoken.pop()]
        done = self.engine.poll()
        self.seen += [(c.version, self.asked[c.key].prompt, c.tokens, c.logp) for c in done]
        return done


def responses(prompt: str) -> list[str]:
    nonce = prompt.split("<<<TASK ")[1].split(">>>")[0]
    names = [name for name in ("RESPONSE", "RESPONSE A", "RESPONSE B") if f"<<<{name} {nonce}>>>" in prompt]
    return [prompt.split(f"<<<{name} {nonce}>>>\n")[1].split(f"\n<<<END {name} {nonce}>>>")[0] for name in names]


def says(prompt: str) -> str:
    """A grade, or the better one, of the characters; what holds an `e` gets no verdict at the first attempt."""
    found = responses(prompt)
    values = [sum(map(ord, text)) % 11 for text in found]
    if len(found) == 1:
        return json.dumps({"reason": "", "grade": values[0]})
    better = "tie" if values[0] == values[1] else "A" if values[0] > values[1] else "B"
    return json.dumps({"reason": "", "better": better})


def opened(world, folder: str, sections: dict, speaks: bool):
    Path(folder).mkdir(exist_ok=True)
    sections = sections | {"run": sections["run"] | {"dir": folder}}
    run = build_run(Session(config(**sections), world, Timer()))
    assert run.sampler and run.sampler.judges
    engine = Watched(run.sampler.engine, run.tokenizer, says if speaks else None)
    run.sampler.engine = run.sampler.judges.engine = engine  # type: ignore[assignment]
    return run, engine


def trained(world, folder: str, sections: dict) -> tuple[list[int], list]:
    """Trains; returns versions of the engine's requests in their order, runs of one version once, and costs."""
    run, engine = opened(world, folder, sections, speaks=True)
    train(run)
    spent = [vars(asker.spent) for asker in askers(run.sampler.grader)]
    run.close()
    order = [v for i, v in enumerate(engine.order) if i == 0 or v != engine.order[i - 1]]
    return order, spent


CASES = {
    "policy grades": ({"engine": "policy", "votes": 2}, {}),
    "policy compares": ({"engine": "policy", "compare": 1}, {"eval": {"every": 0}}),
    "frozen grades": ({"engine": "JUDGE"}, {}),
    "frozen compares": ({"engine": "JUDGE", "compare": 9}, {}),
    "beside others": ({"engine": "JUDGE", "compare": 9}, {"reward": {"function": "exact_match"}}),
    "idle engine": ({"engine": "JUDGE"}, {"eval": {"prompts": 1}}),
    "two rounds": ({"engine": "JUDGE"}, {"filter": {"keep": "mixed", "max_rounds": 9}, "eval": {"every": 0}}),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_engine_judges_alike_on_any_ranks(case, folders, tmp_path):
    """One rank, two with an engine each, and two that share one give the same numbers."""
    given, more = CASES[case]
    policy, judge = folders
    frozen = given["engine"] == "JUDGE"
    file = judged(tmp_path, **given | ({"engine": judge} if frozen else {}))
    reward = {"function": file}
    if "reward" in more:
        other = judged(tmp_path, "other", engine="policy")
        reward = {"function": "exact_match", "more": (f"{other}=0.5", f"{file}=0.25")}
    sections = settings(tmp_path, policy, **more | {"reward": reward})
    rows, costs = {}, {}
    for name, ranks, tp in (("one", 1, 1), ("two", 2, 1), ("shared", 2, 2)):
        given_tp = sections | {"rollout": sections["rollout"] | {"tp": tp}}
        found = run_ranks(trained, ranks, str(tmp_path / name), given_tp, rollout_tp=tp)
        rows[name] = untimed(metrics(tmp_path / name))
        leads = found[:1] if tp > 1 else found
        costs[name] = sum((Counter(each) for _, spent in leads for each in spent), Counter())
        assert all(order == found[0][0] for order, _ in found) or tp == 1, "the ranks of an engine ask alike"
        if frozen:
            # The judge, and only it, stands between two rollouts.
            assert all(-2 in order and min(order) == -2 for order, _ in found)
            assert all((a == -2) != (b == -2) for order, _ in found for a, b in zip(order, order[1:], strict=False))
    assert costs["one"]["calls"] and costs["one"] == costs["two"] == costs["shared"]
    assert [row["step"] for row in rows["one"]] == list(range(1, STEPS + 1))
    assert all(row["reward/ungraded"] == 0 and 0 < row["reward/mean"] < 1.75 for row in rows["one"])
    assert rows["one"][0]["grad_norm"] > 1e-4
    for other in ("two", "shared"):
        for a, b in zip(rows["one"], rows[other], strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - {"microbatches"}:
                assert abs(a[key] - b[key]) < 1e-6, (other, a["step"], key, a[key], b[key])


def logp_of(folder: str, seen: list[tuple]) -> float:
    """Largest distance between the engine's logp of what it sampled and transformers' by the weights of a folder."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for _, prompt, tokens, logp in seen:
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = hf(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        want = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        gap = (want - torch.tensor(logp)).abs().max().item()
        assert math.isfinite(gap)
        worst = max(worst, gap)
    return worst


def sampled(world, folder: str, sections: dict, policy: str, judge: str) -> dict:
    run, engine = opened(world, folder, sections, speaks=False)
    with run.memory.rollout_phase():
        run.evaluate(0)
        done = run.experience(0)
    held = engine.version
    mine, theirs = ([s for s in engine.seen if (s[0] < 0) == frozen] for frozen in (False, True))
    with run.memory.training_phase():
        pass
    with run.memory.rollout_phase():
        again = engine.version
    asker = askers(run.sampler.grader)[0]
    assert isinstance(asker, EngineAsker)
    run.close()
    return {
        "versions": [v for i, (v, *_) in enumerate(engine.seen) if i == 0 or v != engine.seen[i - 1][0]],
        "counts": (len(mine), len(theirs)),
        "policy": logp_of(policy, mine),
        "judge": logp_of(judge, theirs),
        "other": min(logp_of(judge, mine), logp_of(policy, theirs)),
        "held": (held, again),
        "spent": vars(asker.spent),
        "verdicts": [(prompt, tokens) for _, prompt, tokens, _ in theirs],
        "left out": [math.isnan(e.reward) and e.ungraded for e in done.episodes],
    }


@pytest.mark.parametrize(("level", "tp"), [(0, 1), (1, 2), (2, 1)])
def test_stale_the_engine_samples_verdicts_by_the_judge_and_responses_by_the_policy(level, tp, folders, tmp_path):
    """Every token that two engines, or one of two ranks, sampled in an evaluation and a step, with its logp."""
    policy, judge = folders
    file = judged(tmp_path, engine=judge, max_new_tokens=12, temperature=1.0)
    sections = settings(
        *(tmp_path, policy),
        model={"dtype": "float32"},
        rollout={"sleep_level": level, "tp": tp},
        reward={"function": file, "max_ungraded": 1.0},
    )
    for found in run_ranks(sampled, 2, str(tmp_path / "run"), sections, policy, judge, rollout_tp=tp):
        assert found["versions"] == [0, -2, 0, -2], "the policy comes back before the step samples"
        assert found["policy"] < 1e-4 and found["judge"] < 1e-4 and found["other"] > 0.1
        # Half of 4 prompts x 2 and 4 x 3 to each engine; two attempts at each verdict.
        assert found["counts"] == ((10, 20) if tp == 1 else (20, 40))
        assert found["held"] == (-2, 0), "the phase ends with the judge, and the next one begins with the policy"
        assert found["spent"]["bad_verdicts"] == found["spent"]["calls"] == found["counts"][1]
        assert found["spent"]["completion_tokens"] > 0 and all(found["left out"])


def test_layout_the_same_verdicts_are_sampled_on_one_rank_and_on_two(folders, tmp_path):
    """Every question, with its random word, and every token that float32 draws at a temperature."""
    policy, judge = folders
    file = judged(tmp_path, engine=judge, compare=2, max_new_tokens=12, temperature=1.0)
    sections = settings(*(tmp_path, policy), model={"dtype": "float32"}, reward={"function": file, "max_ungraded": 1.0})
    found = []
    for ranks in (1, 2):
        got = run_ranks(sampled, ranks, str(tmp_path / str(ranks)), sections, policy, judge)
        found.append(sorted(verdict for each in got for verdict in each["verdicts"]))
    # Both orders of 4 pairs of the evaluation and 4 x 3 of the step; an attempt more where both gave none.
    assert found[0] == found[1] and len(found[0]) == 2 * 2 * (4 + 12)


def test_verdicts_that_are_none_end_the_job_with_what_to_change(folders, tmp_path):
    policy, judge = folders
    file = judged(tmp_path, engine="policy", max_new_tokens=12, temperature=1.0)
    sections = settings(tmp_path, policy, reward={"function": file}, eval={"every": 0})
    with pytest.raises(
        RankError, match="12 of 12 samples of a step could not be graded by .*--reward.max-ungraded 0.05"
    ):
        run_ranks(trained_by_itself, 2, str(tmp_path / "run"), sections)


def trained_by_itself(world, folder: str, sections: dict) -> None:
    run, _ = opened(world, folder, sections, speaks=False)
    train(run)


def left(world, folder: str, sections: dict) -> tuple[bool, int]:
    """A notice of preemption comes while the judge works."""
    run, engine = opened(world, folder, sections, speaks=False)
    submit = engine.submit

    def notice(request):
        if request.max_new_tokens == VERDICT and world.rank == 0:
            # Heard of long ago.
            preemption.accept(Request("SIGTERM", 0, time.time(), 100.0))
            preemption.received -= 90.0
        submit(request)

    engine.submit = notice  # type: ignore[method-assign]
    try:
        with run.memory.rollout_phase():
            run.experience(0)
    except PreemptedError as error:
        with run.memory.training_phase():
            pass
        return error.abandoned, engine.engine.poll() == [] and run.models.policy.version
    raise AssertionError("it went on")


@pytest.mark.parametrize("tp", [1, 2])
def test_lockstep_a_rollout_is_left_while_the_judge_works(tp, folders, tmp_path):
    policy, judge = folders
    file = judged(tmp_path, engine=judge, temperature=1.0)
    sections = settings(tmp_path, policy, rollout={"tp": tp}, reward={"function": file})
    assert run_ranks(left, 2, str(tmp_path / "run"), sections, rollout_tp=tp) == [(True, 0)] * 2


def built(world, folder: str, sections: dict) -> None:
    opened(world, folder, sections, speaks=False)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no template", "judge.yaml: engine .*: the tokenizer in .* has no chat template"),
        ("a template that renders nothing", "could not render a question .*nothing here"),
        ("another config", "its config.json has rope_parameters .*, .*must have the policy's architecture"),
        ("other shapes", "its config.json has intermediate_size 48, the policy's 40"),
        (
            "a tensor is missing",
            "some of the policy's tensors are missing or have another shape \\(number: 1, the first: model.norm",
        ),
        ("other tokens", "its tokenizer gives .* another id"),
        ("absent", "judge.yaml: engine '/absent' is not a folder"),
        ("quantised", "is quantised by gptq: .* \\(.*judge.yaml: engine\\)"),
        ("too long", "max_prompt_tokens 4090, max_new_tokens 96: their sum exceeds the 4096 tokens that"),
    ],
)
def test_judges_that_the_engine_cannot_be_are_refused_before_training(case, told, folders, tmp_path):
    policy, judge = folders
    changes = {"another config": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}}
    changes |= {"other shapes": {"intermediate_size": 48}}
    templates = {"no template": None, "a template that renders nothing": "{{ raise_exception('nothing here') }}"}
    other = model(tmp_path / "other", 1, templates.get(case, TEMPLATE), **changes.get(case, {}))
    if case == "other tokens":
        tokens = tmp_path / "other" / "tokenizer.json"
        held = json.loads(tokens.read_text())
        vocab = held["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        tokens.write_text(json.dumps(held))
    if case == "a tensor is missing":
        from safetensors.torch import load_file, save_file

        file = Path(other) / "model.safetensors"
        held = load_file(file)
        save_file({k: v for k, v in held.items() if k != "model.norm.weight"}, file, {"format": "pt"})
    if case == "quantised":
        told_of = json.loads((tmp_path / "other" / "config.json").read_text())
        told_of |= {"quantization_config": {"quant_method": "gptq", "bits": 8}}
        (tmp_path / "other" / "config.json").write_text(json.dumps(told_of))
    more = {"max_prompt_tokens": 4090} if case == "too long" else {}
    file = judged(tmp_path, engine="/absent" if case == "absent" else other, **more)
    sections = settings(tmp_path, policy, reward={"function": file})
    with pytest.raises(RankError, match=told):
        run_ranks(built, 1, str(tmp_path / "run"), sections)
    shutil.rmtree(other)
