"""The matrix: the same 5 steps of GRPO on every engine, over one rank or two, beside the trainer or apart from it.

At temperature 0 all give the same samples and learn the same from them (law 2 for whole runs); so do FSDP and layouts
of Megatron under vLLM. `matrix.py` is what runs, one job at a time, under real torchrun with vLLM and SGLang.
"""

import json
import math
import re
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from safetensors import safe_open

from benchmarks._models import REWARD, tiny_dense, tiny_mixture
from tests.builds import no_sglang, no_vllm
from tests.e2e import warm
from tests.e2e.runner import argv, metrics, succeed
from tests.ranks.nccl_rules import counts, judge
from tests.ranks.stub_nccl import Comm, Event, Record

pytestmark = pytest.mark.timeout(600)
STEPS, PROMPTS, SAMPLES = 5, 8, 4
LOSS, NORM, LOGP = 1e-5, 1e-5, 2e-5
"""Largest |difference| of losses, KL and entropies, relative difference of gradient norms, and |dlogp|, in float32.

Measured: 5e-7, 3e-7 and 3e-6, for the random models here. In the default model, see `dense`, norms of one rank and two
differ by 1e-3 after four updates.
"""
FLAGS = argv(
    f"--run.steps {STEPS} --rollout.prompts_per_step {PROMPTS} --rollout.samples_per_prompt {SAMPLES} "
    "--rollout.max_prompt_tokens 16 --rollout.max_new_tokens 8 --rollout.assignment static --model.dtype float32 "
    "--algo.aggregation token-mean --algo.kl_coef 0.04 --optimizer.lr 1e-3 --eval.every 0 --checkpoint.no-at-end "
    "--tracking.trackers jsonl --run.timeout 60"
)
"""The mean is over tokens: over sequences, the loss of GRPO's first update on its samples is 0 whatever they are."""
LEARNS = 0.1
"""Every step's |loss| and gradient norm are above it: runs that learn nothing would agree whatever is wrong."""
ENGINES = {"hf": "", "vllm": no_vllm(), "sglang": no_sglang()}
"""Engine -> reason why it cannot run here; empty where it can."""
EXPERTS, PADDED = 8, 64
"""Experts in a layer of `tiny_mixture`, and rows to which engines pad its vocabulary."""
PLACEMENTS = {"colocated": 0, "split": 1}
"""Placement -> ranks that train alone."""
CELLS = [
    pytest.param(engine, tp, placement, marks=pytest.mark.skipif(bool(why), reason=why))
    for engine, why in ENGINES.items()
    for tp in (1, 2)
    for placement in PLACEMENTS
]


MEGATRON = {
    "tp2": "--parallel.tp 2",
    "pp2, layers 2+1": "--parallel.pp 2 --parallel.last_stage_layers 1",
    "ep2": "--parallel.ep 2",
}
"""Layout -> flags, for two ranks that share an engine."""


APART = {"tp2": "--parallel.tp 2", "pp2, layers 1+2": "--parallel.pp 2 --parallel.first_stage_layers 1"}
"""Layout -> flags, for two ranks that train beside one that samples."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> str:
    """Flag that names a random dense model.

    The default model is all but sure of its tokens, and float32 leaves few digits of 1 - p, and so of its gradient:
    only what computes in the same order agrees over 5 updates.
    """
    return f"--model.path {tiny_dense(tmp_path_factory.mktemp('dense'))}"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """Flag that names a random model of two layers with experts and a dense one between them."""
    folder = tiny_mixture(tmp_path_factory.mktemp("mixture"))
    return f"--model.path {folder}"


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """(engine, tp, placement, more flags) -> samples and numbers of each step of that run; run once.

    alone: ranks that train under `split`.
    """
    reward, known = tmp_path_factory.mktemp("reward") / "reward.py", {}
    reward.write_text(REWARD)

    def at(engine: str, tp: int, placement: str, more: str = "", alone: int = 1) -> tuple[list, list]:
        key = (engine, tp, placement, more)
        if key not in known:
            folder, apart = tmp_path_factory.mktemp("run"), alone * PLACEMENTS[placement]
            flags = f"--rollout.engine {engine} --rollout.tp {tp} --parallel.placement {placement} {more}"
            flags += f" --parallel.rollout_ranks {tp}" if apart else ""
            flags += " --rollout.sglang-push broadcast" if apart and engine == "sglang" else ""
            args = [*FLAGS, *argv(flags), "--reward.function", reward, "--run.dir", folder]
            copies = 2 if "--rollout.dp 2" in more else 1
            # The HF engine starts nothing of its own: its ranks are forked, which spares the imports.
            start = warm.succeed if engine == "hf" else succeed
            start(args, 150, ranks=tp * copies + apart, module="tests.engines.matrix")
            samples = [json.loads(line) for line in (folder / "greedy.jsonl").read_text().splitlines()]
            known[key] = samples, metrics(folder)
            at.pushed[key] = [json.loads(f.read_text()) for f in sorted(folder.glob("pushed_*.json"))]
            files = sorted(folder.glob("record_*.pt"))
            with torch.serialization.safe_globals([Record, Comm, Event]):
                at.records[key] = [torch.load(file, weights_only=True) for file in files]
        return known[key]

    at.records, at.pushed = {}, {}
    return at


@pytest.fixture(scope="module")
def all_experts(tmp_path_factory) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Flag that names a random model with experts in every layer, and the shapes of its tensors."""
    folder = tiny_mixture(tmp_path_factory.mktemp("experts"), dense=())
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return f"--model.path {folder}", shapes


def differences(one: tuple[list, list], other: tuple[list, list]) -> list[str]:
    """Differences of samples and numbers between two runs, in words."""
    out = []
    for step, (a, b) in enumerate(zip(one[0], other[0], strict=True), 1):
        wrong = [(x[:2], x[2:], y[2:]) for x, y in zip(a, b, strict=True) if x != y]
        out += [f"step {step}: {len(wrong)} of {len(a)} samples differ, the first: {wrong[0]}"] if wrong else []
    bounds = {"loss": LOSS, "kl/mean": LOSS, "entropy/mean": LOSS, "reward/mean": 1e-9, "grad_norm": NORM}
    for a, b in zip(one[1], other[1], strict=True):
        for name, bound in bounds.items():
            gap = abs(a[name] - b[name]) / (abs(a[name]) if name == "grad_norm" else 1.0)
            out += [] if gap <= bound else [f"step {a['step']}: {name} {a[name]} and {b[name]}"]
    return out


def learns(rows: list[dict]) -> bool:
    """Tells whether every step had something to learn."""
    return all(abs(row["loss"]) > LEARNS and row["grad_norm"] > LEARNS for row in rows)


@pytest.mark.parametrize(("engine", "tp", "placement"), CELLS)
def test_parity_of_every_engine_layout_and_placement(cell, dense, engine, tp, placement):
    found = cell(engine, tp, placement, dense)
    assert differences(cell("hf", 1, "colocated", dense), found) == []
    for row in found[1]:
        assert row["logp_diff/max"] < LOGP, "what the engine reports is what the trainer computes"
    check_order(cell)


def check_order(cell) -> None:
    """Checks that NCCL would accept the splits and collectives of the jobs so far (law 1)."""
    for key, records in cell.records.items():
        copies = 2 if "--rollout.dp 2" in key[3] else 1
        if key[0] != "hf" and (key[1] * copies > 1 or PLACEMENTS[key[2]]):
            assert len(records) == key[1] * copies + PLACEMENTS[key[2]], key
            assert all(sum(e.op == "split" for e in r.events) > 3 and len(r.events) > 50 for r in records), key
            assert judge(records) == [], key
            print(key[:3], counts(records), {r.rank: kinds(r) for r in records})


def kinds(record) -> dict[str, int]:
    """Number of groups of each kind that a rank is in."""
    return dict(Counter(comm.kind for comm in record.comms.values()))


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
@pytest.mark.skipif(bool(no_vllm()), reason=no_vllm())
@pytest.mark.parametrize("layout", MEGATRON)
def test_parity_of_megatron_layouts_with_fsdp_under_vllm(cell, mixture, layout):
    samples, rows = cell("vllm", 1, "colocated", mixture)
    found = cell("vllm", 2, "colocated", f"{mixture} --policy.backend megatron {MEGATRON[layout]}")
    assert differences((samples, rows), found) == []
    assert len(samples) == STEPS and learns(rows), rows
    print(layout, "worst |dlogp|", max(row["logp_diff/max"] for row in found[1]))
    for row in found[1]:
        assert row["logp_diff/max"] < LOGP, "what the engine reports is what the trainer computes"
    check_order(cell)


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
@pytest.mark.parametrize("layout", APART)
def test_parity_of_megatron_split_with_fsdp(cell, mixture, layout):
    """Two ranks train while a third, which has no part of Megatron's groups, samples."""
    want = cell("hf", 1, "colocated", mixture)
    found = cell("hf", 1, "split", f"{mixture} --policy.backend megatron {APART[layout]}", alone=2)
    assert differences(want, found) == []
    print(layout, "worst |dlogp|", max(row["logp_diff/max"] for row in found[1]))
    for row in found[1]:
        assert row["logp_diff/max"] < LOGP, "what the engine reports is what the trainer computes"
        assert row["rollout/staleness"] == 0


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_stale_samples_of_megatron_split(cell, mixture):
    """One step ahead samples are a version old, and from step 2 on the run learns from others than a run in turn."""
    want = cell("hf", 1, "colocated", mixture)
    flags = f"{mixture} --policy.backend megatron {APART['tp2']} --rollout.staleness 1"
    samples, rows = cell("hf", 1, "split", flags, alone=2)
    assert [row["rollout/staleness"] for row in rows] == [min(step, 1) for step in range(STEPS)]
    # The first update is the same, and its samples are too.
    assert samples[0] == want[0][0] and abs(rows[0]["loss"] - want[1][0]["loss"]) < LOSS
    assert rows[0]["logp_diff/max"] < LOGP < rows[1]["logp_diff/max"]


@pytest.mark.parametrize(
    ("engine", "tp", "dp"),
    [
        pytest.param(engine, tp, 2 // tp, marks=pytest.mark.skipif(bool(ENGINES[engine]), reason=ENGINES[engine]))
        for engine in ("vllm", "sglang")
        for tp in (2, 1)
    ],
)
def test_parity_of_experts_divided(cell, all_experts, engine, tp, dp):
    """Whole experts on two ranks, which divide the attention or copy it, and of each rank only what it needs."""
    flag, shapes = all_experts
    found = cell(engine, tp, "colocated", f"{flag} --rollout.ep 2 --rollout.dp {dp}")
    assert differences(cell("hf", 1, "colocated", flag), found) == []
    assert learns(found[1]), found[1]
    print(engine, tp, dp, "worst |dlogp|", max(row["logp_diff/max"] for row in found[1]))
    for row in found[1]:
        assert row["logp_diff/max"] < LOGP, "what the engine reports is what the trainer computes"
    pushed = cell.pushed[engine, tp, "colocated", f"{flag} --rollout.ep 2 --rollout.dp {dp}"]
    assert pushed == [sum(needed(shapes, engine, tp, rank).values()) for rank in range(2)]
    check_order(cell)


def needed(shapes: dict[str, tuple[int, ...]], engine: str, tp: int, rank: int) -> dict[str, int]:
    """Bytes of each tensor that one of two ranks needs: half of the experts, and its part of what `tp` divides."""
    experts = {i for i in range(EXPERTS) if i // (EXPERTS // 2) == rank}
    vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} if tp == 2 else set()
    if engine == "sglang":
        vocabulary.add("lm_head.weight")  # SGLang divides the head over the copies of the attention too
    out = {}
    for name, shape in shapes.items():
        numel = math.prod(shape)
        if expert := re.search(r"experts\.(\d+)\.", name):
            numel *= int(expert[1]) in experts
        elif name in vocabulary:
            rows = min(shape[0], (rank + 1) * PADDED // 2) - rank * PADDED // 2
            numel = rows * shape[1]
        elif tp == 2 and re.search(r"[qkvo]_proj", name):
            numel //= 2
        out[name] = 4 * numel
    return out


def test_parity_of_runs_that_learn_something(cell, dense):
    """Samples that never change would agree whatever is wrong, and so would a loss that is always 0."""
    samples, rows = cell("hf", 1, "colocated", dense)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(len(step) == PROMPTS * SAMPLES for step in samples)
    assert all(len({tuple(tokens) for _, _, tokens, _ in step}) > 2 * PROMPTS for step in samples), "lengths differ"
    assert learns(rows), rows
    assert {finish for step in samples for *_, finish in step} == {"stop", "length"}


def test_parity_is_lost_by_another_learning_rate(cell, dense, mixture):
    """The check can fail: a learning rate 5% higher shows in numbers and samples."""
    for model in (dense, mixture):
        faster = f"{model} --optimizer.lr 1.05e-3"
        found = differences(cell("hf", 1, "colocated", model), cell("hf", 1, "colocated", faster))
        for name in ("samples differ", "loss", "entropy/mean", "grad_norm"):
            assert any(name in line for line in found), (name, found)
