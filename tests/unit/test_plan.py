"""The planner's arithmetic against counts by hand and simulated schedules, and its command with good and bad input."""

import json
import math
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.schema import Config
from spmdrl.plan.__main__ import main
from spmdrl.plan.changes import Change, changed, changes_of
from spmdrl.plan.gpus import GPUS
from spmdrl.plan.kinds import Kind, kinds_of
from spmdrl.plan.numbers import META
from spmdrl.plan.paper import Paper
from spmdrl.plan.report import facts_of, verdict_lines
from spmdrl.plan.run import Plan, Planned, means_of
from spmdrl.plan.scale import (
    Axes,
    Load,
    bound_of,
    in_flight,
    line,
    load_of,
    parking_bound,
    peak_of,
    rank_of,
    rollout_bound,
)
from spmdrl.plan.storages import Moment
from spmdrl.plan.traffic import Traffic, sent

ROOT = Path(__file__).resolve().parents[2]
SMOL = ["--config", str(ROOT / "configs/smollm2_addition.yaml")]
SMOL += ["--model.path", str(ROOT / "configs/models/SmolLM2-135M-Instruct")]


def config(**parallel) -> Config:
    cfg = Config()
    for name, value in parallel.items():
        setattr(cfg.parallel, name, value)
    return cfg


# ── kinds of ranks ───────────────────────────────────────────────────────────


def test_plan_kinds_of_one_stage():
    (kind,) = kinds_of(config(), 8, [12], [False] * 12)
    assert (kind.rank, kind.ranks, kind.stage) == (0, 8, 0)


def test_plan_kinds_of_stages_alike_are_one_kind():
    kinds = kinds_of(config(pp=4), 16, [3] * 4, [True] * 12)
    assert [(k.rank, k.ranks, k.stage) for k in kinds] == [(0, 4, 0), (4, 8, 1), (12, 4, 3)]
    assert [k.name for k in kinds] == ["first stage", "stages 1 to 2", "last stage"]
    assert [k.alike for k in kinds] == [(0,), (1, 2), (3,)]


def test_plan_kinds_of_stages_that_differ():
    """Layers without experts on the first stage, one more kind where a middle stage has one, fewer on the last."""
    kinds = kinds_of(config(pp=4), 8, [3, 3, 3, 1], [False] * 4 + [True] * 6)
    assert [(k.rank, k.ranks, k.stage) for k in kinds] == [(0, 2, 0), (2, 2, 1), (4, 2, 2), (6, 2, 3)]


def test_plan_kinds_of_split_placement():
    cfg = config(placement="split", rollout_ranks=3, scoring_ranks=2)
    kinds = kinds_of(cfg, 8, [4], [False] * 4)
    assert [(k.name, k.rank, k.ranks) for k in kinds] == [
        ("ranks that train", 0, 3),
        ("ranks that score", 3, 2),
        ("ranks that sample", 5, 3),
    ]
    cfg.parallel.scoring_ranks = 0  # the trainers score
    assert [k.ranks for k in kinds_of(cfg, 8, [4], [False] * 4)] == [5, 3]


# ── schedules ────────────────────────────────────────────────────────────────


def most_alive(order: list[tuple[str, int]]) -> int:
    """The most chunks of which a forward has run and the backward has not."""
    alive = most = 0
    for what, _ in order:
        alive += 1 if what == "F" else -1
        most = max(most, alive)
    return most


def one_f_one_b(stage: int, stages: int, micros: int) -> list[tuple[str, int]]:
    """1F1B: forwards until the first backward can arrive, then one of each in turn, then the rest."""
    warm = min(stages - stage - 1, micros)
    order = [("F", i) for i in range(warm)]
    for i in range(micros - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(micros - warm, micros)]


def interleaved(stage: int, stages: int, virtual: int, micros: int) -> list[tuple[str, int]]:
    """The interleaved schedule, as Megatron's `get_pp_rank_microbatches` warms it up."""
    total = micros * virtual
    warm = min(total, (stages - stage - 1) * 2 + (virtual - 1) * stages)
    order = [("F", i) for i in range(warm)]
    for i in range(total - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(total - warm, total)]


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 4, 8, 24])
def test_plan_in_flight_equals_simulated_schedules(stages, micros):
    for stage in range(stages):
        order = one_f_one_b(stage, stages, micros)
        assert in_flight(stage, stages, 1, micros) == most_alive(order)
        for virtual in (2, 3):
            if stages > 1 and micros % stages == 0:
                order = interleaved(stage, stages, virtual, micros)
                assert in_flight(stage, stages, virtual, micros) == most_alive(order)


def test_plan_simulated_schedules_run_every_stage_to_its_end():
    """The orders of all stages can run against one another: a forward waits for the stage before, a backward for the
    one behind."""
    for stages, micros in ((2, 4), (4, 4), (4, 9)):
        orders = [one_f_one_b(stage, stages, micros) for stage in range(stages)]
        done: list[set] = [set() for _ in range(stages)]
        for _ in range(4 * stages * micros):
            for stage, order in enumerate(orders):
                what, i = order[0] if order else ("", 0)
                before = stage - 1 if what == "F" else stage + 1
                if order and (not 0 <= before < stages or (what, i) in done[before]):
                    done[stage].add(order.pop(0))
        assert not any(orders)


# ── from few micro-batches to all ────────────────────────────────────────────


def test_plan_line_goes_through_the_last_two_points():
    assert line([(3, 7)], 100) == 7
    assert line([(2, 7), (2, 9)], 100) == 9
    assert line([(1, 10), (3, 16)], 5) == 22 and line([(0, 0), (1, 10), (3, 16)], 5) == 22


def work(kind: str, points: list[tuple[int, dict]], total: int, times: int = 1, flops=(), traffic=(), kept=(0, 0)):
    passes = []
    for i, (micros, tags) in enumerate(points):
        load = traffic[i] if traffic else Traffic()
        passes.append(
            SimpleNamespace(
                micros=micros,
                peak=Moment(sum(tags.values()), tags),
                flops=flops[i] if flops else 0,
                traffic=load,
                kept=kept[i],
            )
        )
    return SimpleNamespace(model="policy", kind=kind, total=total, times=times, passes=passes)


def test_plan_peak_of_a_pipeline_grows_by_micro_batches_in_flight():
    # 10 for each micro-batch in flight on top of 100; on paper with 2 and 4 of 64, of which 8 are in flight.
    made = work("update", [(2, {"a": 120, "w": 5}), (4, {"a": 140, "w": 5})], 64)
    assert peak_of(made, 0, 8, 1) == {"a": 180, "w": 5}
    assert peak_of(made, 7, 8, 1) == {"a": 140, "w": 5}  # the last stage has one in flight
    assert peak_of(made, 0, 1, 1) == {"a": 140, "w": 5}  # without a pipeline: the greater of both
    assert peak_of(work("logp", [(1, {"a": 9}), (2, {"a": 8})], 64), 0, 8, 1) == {"a": 9}


def test_plan_peak_holds_what_every_micro_batch_adds_for_the_whole_pass():
    # 3 bytes for each of 10 micro-batches, of which 2 are in the peak already.
    points = [(1, {"activations": 20}), (2, {"activations": 23})]
    assert peak_of(work("logp", points, 10, kept=(5, 8)), 0, 1, 1) == {"activations": 23 + 8 * 3}
    assert peak_of(work("logp", points, 2, kept=(5, 8)), 0, 1, 1) == {"activations": 23}


def test_plan_load_of_all_micro_batches_and_updates():
    traffic = [Traffic(), Traffic()]
    for n, one in zip((1, 2), traffic, strict=True):
        one.bytes["dp", "all-gather"], one.calls["dp", "all-gather"] = 100 + 7 * n, 3 + n
    made = work("update", [(1, {}), (2, {})], 10, times=4, flops=(5, 9), traffic=traffic)
    load = load_of(made)
    assert load.flops == (5 + 4 * 9) * 4
    assert load.sent == {("dp", "all-gather"): (100 + 70) * 4} and load.calls == {("dp", "all-gather"): 13 * 4}


# ── worst and mean ───────────────────────────────────────────────────────────


def test_plan_mean_is_that_of_all_ranks_each_stage_with_its_own_micro_batches_in_flight():
    """Four stages of two ranks, of which the middle ones are one kind; and three ranks that sample."""

    def step(*points):
        moments = {"push": Moment(7, {"push buffers": 7}), "rollout": Moment(9, {"parameters": 9})}
        works = [work("update", list(points), 64)] if points else []
        more = dict(push=None, host={}, parked={}, held={}, numbers=1, checkpoint=0)
        return SimpleNamespace(moments=moments, works=works, models=(), moved=(0, 0), **more)

    def planned(kind, made):
        each = [rank_of(made, stage, 4, 1, {}, kind.stage) for stage in kind.alike]
        return Planned(kind, each[0], {}, {}, 1, means_of(each))

    # 10 bytes for each micro-batch in flight; the head's 50 are on the last stage, which never has two.
    kinds = [
        planned(Kind("first", 0, 2), step((1, {"a": 110}), (2, {"a": 120}))),
        planned(Kind("middle", 2, 4, 1, (1, 2)), step((1, {"a": 90}), (2, {"a": 100}))),
        planned(Kind("last", 6, 2, 3, (3,)), step((1, {"a": 90, "logits": 50}), (2, {"a": 90, "logits": 50}))),
        planned(Kind("sample", 8, 3), step()),
    ]
    made = Plan(Config(), 11, GPUS["h100"], kinds)
    by_hand = 2 * (100 + 4 * 10) + 2 * (80 + 3 * 10) + 2 * (80 + 2 * 10) + 2 * (80 + 10 + 50)
    assert made.phases() == {"push": (7, 7.0), "rollout": (9, 9.0), "update": (140, by_hand / 8)}
    assert kinds[1].means["update"] == 105 and kinds[1].peak() == ("update", 110)
    facts = facts_of(made)
    assert facts["device_bytes"]["update"] == {"worst": 140, "mean": by_hand / 8}
    assert facts["kinds"][1]["mean_device_bytes"]["update"] == 105
    (told,) = [line for line in verdict_lines(made) if line.startswith("memory")]
    assert told.endswith("push 0.00 / 0.00, rollout 0.00 / 0.00, update 0.00 / 0.00")


def of_stage(cfg: Config, stage: int) -> dict[str, int]:
    """Phase -> bytes on the device of a rank of one stage of four, planned by itself."""
    from spmdrl.plan.rank import open_rank

    made = open_rank(cfg, 2 * stage, 8, "cuda", int(GPUS["h100"].memory_gib * (1 << 30)))
    rank = rank_of(made.step(), stage, 4, 1, made.engine.sampling_bytes())
    return {phase: sum(tags.values()) for phase, tags in rank.memory.items()}


@pytest.mark.slow
def test_plan_mean_of_a_pipeline_is_that_of_its_stages_planned_one_by_one(tmp_path):
    from transformers import Qwen2Config

    from spmdrl.config.load import from_command_line
    from spmdrl.plan.run import plan, side_by_side

    pytest.importorskip("megatron.core")
    sizes = dict(vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    flags = ["--policy.backend", "megatron", "--parallel.pp", "4", "--policy.max-tokens-per-microbatch", "1024"]
    cfg = from_command_line(["--model.path", str(tmp_path), "--model.dtype", "bfloat16", *flags]).config
    each = list(side_by_side([partial(of_stage, cfg, stage) for stage in range(4)]))
    assert each[0]["update"] > each[1]["update"] > each[2]["update"], "fewer micro-batches are in flight"
    made = plan(cfg, 8, GPUS["h100"])
    assert [p.kind.alike for p in made.kinds] == [(0,), (1, 2), (3,)]
    for phase, (worst, mean) in made.phases().items():
        assert worst == pytest.approx(max(stage[phase] for stage in each), rel=1e-5)
        assert mean == pytest.approx(sum(stage[phase] for stage in each) / 4, rel=1e-5)


# ── traffic ──────────────────────────────────────────────────────────────────


def ring(kind: str, n: int, size: int) -> int:
    """Bytes that one rank of a ring sends, round by round; size: of the whole, in n equal chunks."""
    rounds = {"all-gather": n - 1, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1)}[kind]
    return sum(size // n for _ in range(rounds))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_plan_sent_equals_a_ring_round_by_round(n):
    whole, part = torch.empty(24 * n), torch.empty(24)
    size = whole.nbytes
    assert sent("all-gather", n, 0, (whole, part)) == ring("all-gather", n, size)
    assert sent("all-gather", n, 0, ([[part] * n], [part])) == ring("all-gather", n, size)
    assert sent("reduce-scatter", n, 0, (part, whole)) == ring("reduce-scatter", n, size)
    assert sent("all-reduce", n, 0, ([whole],)) == ring("all-reduce", n, size)
    assert sent("all-to-all", n, 0, (whole, whole)) == size // n * (n - 1)
    assert sent("send", n, 0, ([part],)) == sent("broadcast", n, 0, ([part],)) == part.nbytes
    assert sent("receive", n, 0, ([part],)) == sent("barrier", n, 0, (part,)) == 0


# ── paper ────────────────────────────────────────────────────────────────────


def test_plan_paper_counts_a_small_program_as_by_hand():
    with Paper() as paper:
        a = torch.empty(8, 16, device=META)  # 512 bytes
        b = torch.empty(16, 32, device=META)  # 2,048
        assert paper.live == 2560
        c = a @ b  # 1,024
        assert paper.flops == 2 * 8 * 16 * 32
        view = c.view(-1)[3:]
        assert paper.live == 3584, "a view holds nothing"
        del a, b, c
        assert paper.live == 1024, "the view keeps its storage"
        del view
        assert paper.live == 0 and paper.lap().live == 3584
        assert paper.lap().live == 0, "a lap begins with what lives at its start"


def test_plan_paper_backward_frees_what_it_kept():
    with Paper() as paper:
        w = torch.empty(64, 64, device=META, requires_grad=True)
        y = (torch.empty(4, 64, device=META) @ w).relu().sum()
        forward = paper.flops
        y.backward()
        del y
        assert w.grad is not None and paper.live == 2 * w.nbytes
        assert paper.flops == 2 * forward, "the input asks for no gradient"


def test_plan_paper_tags_and_retags():
    with Paper() as paper:
        with paper.tagged("weights"):
            w = torch.empty(100, device=META)
        x = torch.empty(50, device=META)
        assert {tag: n for tag, n in paper.by_tag.items() if n} == {"weights": 400, "activations": 200}
        paper.retag([x], "logits")
        assert paper.by_tag["logits"] == 200 and paper.by_tag["activations"] == 0 and paper.live == 600
        del w, x
        assert not any(paper.by_tag.values())


def test_plan_paper_follows_storages_that_change_size():
    with Paper() as paper:
        x = torch.empty(100, device=META)
        storage = x.untyped_storage()
        storage.resize_(0)
        paper.resized(storage)
        assert paper.live == 0
        storage.resize_(800)
        paper.resized(storage)
        assert paper.live == 800 and paper.lap().live == 800


def test_plan_paper_knows_integers_and_masks():
    with Paper():
        lengths = torch.tensor([3, 0, 5]).to(META)
        assert int(lengths.sum()) == 8 and (lengths.cumsum(0)).tolist() == [3, 3, 8]
        rows = torch.empty(3, 7, device=META)[lengths > 0]
        assert rows.shape == (2, 7)
        assert torch.empty(3, device=META).masked_select(lengths > 2).shape == (2,)
        with pytest.raises(RuntimeError, match="unknown to a plan"):
            torch.empty(3, device=META)[torch.empty(3, device=META) > 0]


def test_plan_paper_forgets_numbers_that_are_overwritten():
    with Paper():
        x = torch.zeros(4, dtype=torch.int64).to(META)
        assert x.tolist() == [0] * 4
        x.copy_(torch.empty(4, device=META))
        with pytest.raises(RuntimeError, match="unknown to a plan"):
            x[0].item()


def test_plan_paper_chooses_experts_evenly():
    with Paper():
        chosen = torch.empty(12, 8, device=META).softmax(-1).topk(2).indices
        assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [3] * 8


# ── times ────────────────────────────────────────────────────────────────────


AXES = Axes({"tp": tuple(range(8)), "dp": (0, 1, 8, 9), "ep": (0, 8, 16), "ep2": (0, 1, 8, 9), "pp": (0, 32)}, 0, 8)
"""Two GPUs of a node are on dp, one on pp."""


def test_plan_bound_is_the_slowest_resource():
    gpu = GPUS["h100"]
    sends = {("tp", "all-reduce"): 450e9, ("pp", "send"): 100e9}
    bound = bound_of(Load(int(989e12), sends, {}), gpu, AXES, 0, 1)
    assert (bound.matrix, bound.nvlink, bound.network) == (1.0, 1.0, 2.0)
    assert bound.seconds == 2.0 and bound.by == "network"
    waits = bound_of(Load(int(989e12)), gpu, AXES, 4, 8)  # 4 micro-batches through 8 stages take 11 turns
    assert math.isclose(waits.seconds, 11 / 4) and waits.by == "matrix rate"


def test_plan_bound_counts_what_leaves_a_node():
    gpu = GPUS["h100"]
    # A ring over two nodes: two cards of this node carry what one rank passes on.
    ring = bound_of(Load(0, {("dp", "all-gather"): 100e9}), gpu, AXES, 0, 1)
    assert (ring.nvlink, ring.network) == (100 / 450, 1.0)
    # Of an all-to-all's parts for three others one stays in the node.
    parts = bound_of(Load(0, {("ep2", "all-to-all"): 150e9}), gpu, AXES, 0, 1)
    assert (parts.nvlink, parts.network) == (50 / 450, 2.0)
    # A push sends and receives at once, here mostly from the other node.
    peers = {("receive", 1): 45 * 10**9, ("receive", 9): 100 * 10**9, ("send", 8): 50 * 10**9}
    push = bound_of(Load(0, {("push", "receive"): 145e9}, {}, peers), gpu, AXES, 0, 1)
    assert (push.nvlink, push.network) == (0.1, 2.0)
    assert parking_bound(64 * 10**9, 32 * 10**9, gpu).seconds == 1.5


def test_plan_rollout_bound_reads_weights_once_for_a_token_of_all_sequences():
    cfg = Config()
    cfg.rollout.prompts_per_step, cfg.rollout.samples_per_prompt = 8, 4
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_new_tokens = 100, 50
    engine = dict(capacity=64, sequences=8, weights=10**12, token_bytes=1000, active_numbers=10**9, ranks=2)
    engine |= dict(expert_share=0.0, chosen_share=1.0, tower_share=0.0, image_flops=0)
    bound = rollout_bound(cfg, GPUS["h100"], 2, engine)  # 16 sequences on an engine, 8 at once, so two rounds
    assert math.isclose(bound.memory, 2 * 50 * (10**12 + 8 * 125 * 1000) / 3.35e12)
    assert math.isclose(bound.matrix, 2 * 10**9 * 16 * (50 + 25) / 2 / 989e12)

    cfg.rollout.dp = 2
    copies = rollout_bound(cfg, GPUS["h100"], 2, engine | {"ranks": 4})  # each copy has 8, all at once
    assert math.isclose(copies.memory, 50 * (10**12 + 8 * 125 * 1000) / 3.35e12)
    assert math.isclose(copies.matrix, 2 * 10**9 * 16 * (50 + 25) / 4 / 989e12)
    # 16 tokens of both copies that choose 1 expert of 8 each read most of them; 0.9 of the weights are experts.
    mixture = rollout_bound(cfg, GPUS["h100"], 2, engine | {"ranks": 4, "expert_share": 0.9, "chosen_share": 1 / 8})
    reads = 10**12 * (0.1 + 0.9 * (1 - (7 / 8) ** 16))
    assert math.isclose(mixture.memory, 50 * (reads + 8 * 125 * 1000) / 3.35e12)
    # A tower runs once for each of the 4 prompts, and no decoding step reads it.
    seeing = rollout_bound(cfg, GPUS["h100"], 2, engine | {"ranks": 4, "tower_share": 0.25, "image_flops": 10**10})
    assert math.isclose(seeing.memory, 50 * (0.75 * 10**12 + 8 * 125 * 1000) / 3.35e12)
    assert math.isclose(seeing.matrix, copies.matrix + 4 * 10**10 / 4 / 989e12)


# ── changes ──────────────────────────────────────────────────────────────────


def test_plan_changes_keep_the_settings_and_pass_their_checks():
    from transformers import AutoConfig

    from spmdrl.config.checks import check
    from spmdrl.config.load import from_command_line

    cfg = from_command_line([*SMOL, "--parallel.dp-replicate", "2"]).config
    hf = AutoConfig.from_pretrained(SMOL[-1])  # 9 attention heads
    made = changes_of(cfg, 8, hf)
    for change in made:
        check(changed(cfg, change), 8)
    flags = [c.flags for c in made]
    assert len(flags) == len(set(flags)) and cfg.policy.offload == "none"
    assert "--policy.offload host" in flags and "--policy.activation-checkpointing full" in flags
    assert not any("--parallel.sp" in f or "--rollout.tp" in f for f in flags), "2 and 4 do not divide 9 heads"
    assert any(f.startswith("--parallel.dp-replicate 1") for f in flags)
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    assert [f for f in flags if "max-tokens" in f][-1] == f"--policy.max-tokens-per-microbatch {longest}"


def test_plan_changes_of_stages_choose_layers_of_the_last():
    from transformers import AutoConfig

    from spmdrl.config.load import from_command_line

    pytest.importorskip("megatron.core")
    cfg = from_command_line(["--config", str(ROOT / "configs/dapo_671b.yaml")]).config
    hf = AutoConfig.from_pretrained(ROOT / "configs/models/DeepSeek-V3-bf16")
    stages = [dict(c.values) for c in changes_of(cfg, 512, hf) if c.values[0][0] == "parallel.pp"]
    # 61 layers: seven stages of 8 and one of 5.
    assert {s["parallel.pp"]: s.get("parallel.last_stage_layers") for s in stages}[8] == 5


def test_plan_changes_add_up():
    a = Change((("policy.offload", "host"),), frozenset({"rollout"}))
    b = Change((("policy.activation_checkpointing", "full"),), frozenset({"update"}))
    assert (a + b).flags == "--policy.offload host --policy.activation-checkpointing full"
    assert a.conflicts(a) and not a.conflicts(b) and (a + b).frees == {"rollout", "update"}


def test_plan_names_the_flag_of_a_model_that_is_not_there(tmp_path):
    from spmdrl.plan.rank import folders_of

    cfg, file = Config(), tmp_path / "rm.yaml"
    cfg.model.path = "tiny"
    file.write_text("path: /absent/a")
    for value, told in (
        ("/absent/b", "--reward.model '/absent/b'"),
        (str(file), f"--reward.model {file}: path '/absent/a'"),
    ):
        cfg.reward.model = value
        with pytest.raises(ValueError, match=f"^{told} is not a folder"):
            folders_of(cfg)
    cfg.reward.model, cfg.safety.cost_model = "", "/absent/c"
    with pytest.raises(ValueError, match="^--safety.cost-model '/absent/c' is not a folder"):
        folders_of(cfg)


# ── other jobs ───────────────────────────────────────────────────────────────

TEACHERS = ["--reference.path", "tiny", "--distill.more-teachers", "tiny=0.5", "tiny@letters"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "flags"),
    [
        ("distill", ["--reference.path", "tiny"]),
        ("distill", [*TEACHERS, "--distill.top-k", "4"]),
        ("online_preference", []),
    ],
)
def test_plan_of_another_job_runs_its_update(job, flags, capsys):
    words = ["--job", job, "--world", "2", "--gpu", "h100", "--json", "-", "--model.path", "tiny", "--no-nearest"]
    assert main([*words, "--rollout.max-prompt-tokens", "64", "--rollout.max-new-tokens", "32", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    trains = facts["kinds"][0]
    assert trains["flops"]["update"] > trains["flops"]["logp"] > 0
    assert "reference parameters" in trains["held_bytes"]


def test_plan_refuses_what_a_distillation_reads_from_texts(capsys):
    words = [
        "--job",
        "distill",
        "--rollout.max-prompt-tokens",
        "64",
        "--world",
        "2",
        "--gpu",
        "h100",
        "--model.path",
        "tiny",
        "--reference.path",
        "tiny",
    ]
    assert main([*words, "--distill.given-per-step", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --distill.given-per-step: a distillation is planned without")


# ── the dry run of a training ────────────────────────────────────────────────


def test_plan_dry_run_on_a_cpu_says_how_to_plan_for_gpus(monkeypatch):
    from spmdrl.config.plan import plan_lines
    from spmdrl.plan.dry import dry_lines
    from spmdrl.train import JOB

    cfg = Config()
    cfg.run.device = "cpu"
    counts = plan_lines(cfg, 4)
    lines = dry_lines(JOB, cfg, 4)
    assert lines[: len(counts)] == counts
    assert "python -m spmdrl.plan with" in lines[len(counts)] and "--world 4" in lines[len(counts)]
    monkeypatch.setenv("RANK", "1")
    assert dry_lines(JOB, cfg, 4) == counts, "rank 0 alone plans"


def test_plan_dry_run_takes_the_memory_that_cuda_reports():
    from spmdrl.plan.dry import device_of

    known = device_of("NVIDIA H200", 150_000_000_000, 4)
    assert (known.memory_gib, known.gpus_per_node, known.matmul_tflops) == (139.7, 4, GPUS["h200"].matmul_tflops)
    other = device_of("NVIDIA L40S", 47_000_000_000, 8)
    assert other.memory_gib == 43.77 and bound_of(Load(10**15), other, AXES, 0, 1).seconds == 0


# ── the command ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "argv, said",
    [
        ([*SMOL, "--world", "6", "--gpu", "h100", "--rollout.tp", "4"], "--rollout.tp 4: must divide the 6 ranks"),
        ([*SMOL, "--world", "6", "--gpu", "h100", "--parallel.sp", "4"], "--parallel.sp 4"),
        ([*SMOL, "--world", "0", "--gpu", "h100"], "--world 0: a job has at least one rank"),
        ([*SMOL, "--world", "8", "--gpu", "h1000"], "is a YAML or JSON file with"),
        ([*SMOL, "--world", "8", "--gpu", "h100", "--policy.offlaod", "host"], "policy.offload"),
        ([*SMOL, "--world", "8", "--gpu", "h100", "--config", "/none.yaml"], "none.yaml"),
    ],
)
def test_plan_command_refuses_mistakes(argv, said, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.slow
def test_plan_command_writes_json_and_a_picture(tmp_path, capsys):
    file = tmp_path / "plan.svg"
    assert main([*SMOL, "--world", "4", "--gpu", "h100", "--json", "-", "--picture", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] and facts["world"] == 4 and facts["verdict"].startswith("fits with")
    assert facts["parameters"] == 134515008
    (kind,) = facts["kinds"]
    held = kind["held_bytes"]
    # float32 weights and two moments, each padded by FSDP to the first rank's rows of every tensor.
    share = 4 * facts["parameters"] / 4
    assert share <= held["policy parameters"] < 1.02 * share
    assert 2 * share <= held["policy optimizer"] < 2.05 * share
    drawn = ET.fromstring(file.read_text())
    titles = [x.text for x in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert any("KV cache" in t for t in titles) and any("optimizer" in t for t in titles)


@pytest.mark.slow
def test_plan_gradients_are_the_whole_models_until_they_are_reduced(capsys):
    """The sharded model is 135M parameters, of which a rank of two has a half; only the row changes, and what it is."""
    argv = [*SMOL, "--world", "2", "--gpu", "h100", "--policy.max-tokens-per-microbatch", "144", "--json", "-"]
    found = {}
    for how in ("last", "each"):
        assert main([*argv, "--policy.reduce-gradients", how, "--policy.gather", "layers"]) == 0
        (kind,) = json.loads(capsys.readouterr().out)["kinds"]
        found[how] = kind["device_bytes"]["update"], kind["held_bytes"], kind["sent_bytes"]["update"]
        micros = kind["microbatches"]["update"]
    rows, held, sent_last = found["last"]
    assert rows["gradients"] == 4 * 134515008
    rows, held, sent_each = found["each"]
    assert rows["gradients"] == held["policy parameters"]
    reduced = "dp_shard: reduce-scatter"
    assert micros > 2 and sent_each[reduced] == micros * sent_last[reduced] and sent_each.keys() == sent_last.keys()


@pytest.mark.slow
def test_plan_command_says_by_how_much_a_job_does_not_fit_and_what_would(tmp_path, capsys):
    gpu = tmp_path / "small.yaml"
    gpu.write_text(
        "name: small\nmemory_gib: 5\nmatmul_tflops: 100\nmemory_tb_s: 1\nnvlink_gb_s: 100\nnetwork_gb_s: 10\n"
    )
    argv = [*SMOL, "--world", "2", "--gpu", str(gpu), "--rollout.gpu-memory-utilization", "0.9"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "GiB too much for each small" in out
    assert "nearest that fits: --" in out and "GiB to spare)" in out


@pytest.mark.slow
def test_plan_command_counts_host_memory_of_a_node(tmp_path, capsys):
    gpu = tmp_path / "little_host.yaml"
    rest = "matmul_tflops: 100\nmemory_tb_s: 1\nnvlink_gb_s: 100\nnetwork_gb_s: 10\nhost_memory_gib: 0.5\n"
    gpu.write_text("name: little\nmemory_gib: 40\n" + rest)
    assert main([*SMOL, "--world", "2", "--gpu", str(gpu), "--policy.offload", "host"]) == 1
    out = capsys.readouterr().out
    assert "GiB too much for the host memory of each node" in out and "nearest that fits: --policy.offload" in out
