"""Law 2 for sequence parallelism: tokens of a pack divided over ranks change nothing, in float64 to 1e-10.

One group of four ranks goes through all layouts and models; one rank does the same without any division.
"""

import shutil
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from spmdrl.config.schema import ParallelConfig
from spmdrl.data.distribute import balance
from spmdrl.data.pack import from_episodes
from spmdrl.hub.folder import TINY
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.ulysses import check_config
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.fsdp import policy as fsdp
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl.policy.objectives.tokens import totals
from spmdrl.spmd.balance import assign_balanced
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.lockstep import Lockstep
from spmdrl.spmd.mesh import world_from_group
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.reshard import inside, size
from tests.ranks.cases import (
    Rewind,
    build_policy,
    config,
    full_weights,
    gradients_of,
    relative,
    small_model,
    synthetic_batch,
)
from tests.ranks.harness import run_ranks
from tests.unit.test_packed_forward import FAMILIES, FLOAT32_NORMS, SMALL, scalar, tokens_of

EXACT = 1e-10
RANKS = 4
LAYOUTS = {"sp4": {"sp": 4}, "dp2 x sp2": {"sp": 2}, "hsdp2 x sp2": {"dp_replicate": 2, "sp": 2}}


def world_of(world, axes: dict):
    """Puts the same ranks under other axes."""
    return world_from_group(ParallelConfig(**axes), 1, world.device, world.rank)


# ── models: heads, families, lengths ─────────────────────────────────────────

MLA = dict(q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4)
MLA |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8)
MODELS: dict[str, tuple[str, dict]] = {
    "4 heads, 2 kv": ("qwen2", {}),
    "4 heads, 1 kv": ("qwen2", {"num_key_value_heads": 1}),
    "4 heads, 4 kv": ("qwen2", {"num_key_value_heads": 4}),
    "12 heads, 6 kv": ("qwen2", {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}),
    "window, softcap": ("gemma2", {}),
    "experts, values narrower than keys": ("deepseek_v3", MLA),
}
LENGTHS = [[2, 40, 3, 17, 5, 2], [9, 9, 9, 9], [1, 30, 2], [21], [3], [2]]
"""Totals that 2 and 4 divide or not, sequences over several ranks, packs shorter than 4."""


def model_of(name: str):
    family, changes = MODELS[name]
    kind, own = FAMILIES.get(family, ("DeepseekV3Config", {}))
    hf_config = getattr(transformers, kind)(**SMALL | own | changes)
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if "moe" in family or "deepseek" in family else {}
    hf = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention.register(), **options)
    return hf.double().train(), family


def run_head(model, lengths, second="entropy", group=None):
    """Returns the head's two tensors and the gradient of a sum of them, over the ranks of the group."""
    tokens, mask = tokens_of(lengths)
    mask[1:2] = True
    model.zero_grad()
    first, other = model(model.plan(tokens, torch.tensor(lengths), mask), 0.7, second)
    scalar(first, other).backward()
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    flat = all_reduce(torch.cat([g.flatten() for g in named.values()]), "sum", group)
    parts = flat.split([g.numel() for g in named.values()])
    return first.detach(), other.detach(), {n: x.view(g.shape) for (n, g), x in zip(named.items(), parts, strict=True)}


def wrong(want, got, exact_of=lambda name: EXACT) -> list[str]:
    out = [f"output {i}" for i in (0, 1) if (want[i] - got[i]).abs().max() > EXACT]
    if want[2].keys() != got[2].keys():
        return [*out, "names"]
    # A single row to read has no gradient through its queries.
    floor = max(g.abs().max().item() for g in want[2].values()) / 1000
    errors = {n: (g - got[2][n]).abs().max().item() / max(g.abs().max().item(), floor) for n, g in want[2].items()}
    return out + [f"{n} {error}" for n, error in errors.items() if error > exact_of(n)]


def models(world):
    """Returns the differences between a whole model and one on 2 or 4 ranks; an empty list is right."""
    groups = {sp: world_of(world, {"sp": sp}).sp_group for sp in (2, 4)}
    out, seen = [], []
    for name in MODELS:
        hf, family = model_of(name)

        def exact_of(parameter, family=family):
            return 1e-6 if family in FLOAT32_NORMS and "norm" in parameter else EXACT

        for lengths in LENGTHS if name == "4 heads, 1 kv" else LENGTHS[:1]:
            want = run_head(PackedLM(hf), lengths)
            for sp, group in groups.items():
                got = run_head(PackedLM(hf, group=group), lengths, group=group)
                out += [f"{name}, {lengths}, sp {sp}: {what}" for what in wrong(want, got, exact_of)]
                seen.append(got[0])
    # The other heads, and layers that run a second time in the backward.
    hf, _ = model_of("4 heads, 1 kv")
    one_label = type(hf.config)(**SMALL | {"num_key_value_heads": 1, "num_labels": 1})
    scores = AutoModelForSequenceClassification.from_config(one_label, attn_implementation=attention.register())
    scores = scores.double().train()
    for sp, group in groups.items():
        for after in (False, True):
            want, got = (run_head(PackedScalar(scores, after=after, group=g), [21, 4], group=g) for g in (None, group))
            out += [f"score, after {after}, sp {sp}: {what}" for what in wrong(want, got)]
        want, got = (run_head(PackedLM(hf, group=g), [21, 4], "collision", g) for g in (None, group))
        out += [f"collision, sp {sp}: {what}" for what in wrong(want, got)]
        want = run_head(PackedLM(hf, group=group), [21, 4], group=group)
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        got = run_head(PackedLM(hf, group=group), [21, 4], group=group)
        hf.gradient_checkpointing_disable()
        out += [f"checkpointing, sp {sp}: {what}" for what in wrong(want, got)]
    return out, seen


def test_layout_models_on_divided_tokens_are_the_whole_models():
    results = run_ranks(models, RANKS)
    for out, seen in results:
        assert out == []
        # To the last bit alike on all ranks of a group: each goes on to the same loss.
        assert all(torch.equal(a, b) for a, b in zip(seen[1::2], results[0][1][1::2], strict=True))
    assert results[0][1][0].abs().max() > 1


# ── policies: layouts, updates, checkpoints ──────────────────────────────────

BATCHES = {"many": (4, 3), "three": (1, 3), "one": (1, 1)}
"""Prompts, samples: fewer sequences than data positions leave some without any."""
CASES = [("many", 70), ("many", 31), ("three", 1 << 20), ("one", 31)]
"""Batch, and tokens of one micro-batch: a few sequences, one, all."""
CASES_OF = {"sp4": CASES[:1], "dp2 x sp2": CASES, "hsdp2 x sp2": CASES[1:3]}


def share_of(world, shape):
    """Takes this rank's balanced share of sequences that are made anywhere; two optimizer steps."""
    batch = from_episodes([t for t in synthetic_batch(*shape) if t.position % world.size == world.rank])
    batch.seq["update"], batch.seq["work"] = batch.seq["position"] % 2, batch.lengths
    return balance(batch, world)


@dataclass
class SequenceLoss(Objective):
    """A term that is not a sum over tokens and one that is, both divided by global counts."""

    peers: Peers
    temperature: float = 0.8
    columns = frozenset({"seq/reward"})

    def prepare(self, share, index):
        return Shared(totals(share, self.peers))

    def loss(self, micro, first_T, second_T, shared):
        mask, seq = micro.token["mask"], micro.seq_index
        zeros = torch.zeros(len(micro), dtype=first_T.dtype)
        mean = zeros.index_add(0, seq, torch.where(mask, first_T, 0.0)) / zeros.index_add(
            0, seq, mask.to(first_T.dtype)
        )
        gain = (torch.exp(mean) * (micro.seq["reward"] - 0.3)).sum() / max(shared.totals.sequences, 1)
        return LossResult(-gain - 0.1 * (second_T * mask).sum() / max(shared.totals.tokens, 1), Metrics())


def update(policy, batch, world):
    """Returns gradients of the optimizer steps that have signal, and the norms."""
    stats = []
    objective = SequenceLoss(world.data_peers)
    seen = gradients_of(policy, lambda: stats.append(policy.update(batch, objective, 2)))
    return seen, stats[0].reduce(lambda x, op: all_reduce(x, op, world.data_group), world.device)


def by_sequence(batch, x_T) -> dict[tuple[int, int], torch.Tensor]:
    names = zip(batch.seq["position"].tolist(), batch.seq["sample"].tolist(), strict=True)
    return dict(zip(names, x_T.split(batch.lengths.tolist()), strict=True))


def settings(folder, budget=70, **policy):
    return config(
        model={"path": folder, "dtype": "float64"},
        algo={"updates_per_step": 2},
        policy={"max_tokens_per_microbatch": budget, **policy},
        optimizer={"lr": 1e-3},
    )


def steps(world, folder, checkpoint, cases, checkpointing="none"):
    """Runs every case from the same weights; then buckets, a checkpoint, and one update after it."""
    policy, out = build_policy(settings(folder, activation_checkpointing=checkpointing), world), {}
    rewind = Rewind(policy)
    for name, budget in cases:
        batch = share_of(world, BATCHES[name])
        rewind(settings(folder, budget))
        logp, entropy = policy.logprobs(batch, 0.8)
        gradients, metrics = update(policy, batch, world)
        weights = full_weights(policy)
        if world.rank:
            # Every rank reports its own part; parts that all hold alike come from one.
            gradients = weights = None
        held = [by_sequence(batch, x) for x in (logp, entropy, batch.token["tokens"])]
        out[name, budget] = gradients, weights, metrics, *held
    whole = full_weights(policy)
    same = []
    for piece in policy.pieces():
        shards = world.shard_mesh.size(world.shard_mesh.ndim - 1)
        same.append(torch.equal(piece.tensor, inside(whole[piece.name], piece.box)))
        same.append(size(piece.box) <= -(-piece.shape[0] // shards) * whole[piece.name][0].numel())
    if checkpoint.exists():
        policy.load(checkpoint)
    else:
        dist.barrier()
        policy.save(checkpoint)
    loaded = full_weights(policy)
    policy.updates_done = 0
    _, metrics = update(policy, share_of(world, BATCHES["many"]), world)
    return out, same, loaded, (metrics, full_weights(policy))


def layouts(world, folder, checkpoint):
    """Runs every layout in turn; the first one saves, the others load what it saved."""
    out, holders = {}, {}
    for name, axes in LAYOUTS.items():
        other = world_of(world, axes)
        scope = "full" if name == "hsdp2 x sp2" else "none"
        out[name] = steps(other, folder, checkpoint, CASES_OF[name], checkpointing=scope)
        holders[name] = other.holders
        dist.barrier()
    return out, holders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    for file in TINY.glob("*token*"):
        shutil.copy(file, root)
    return small_model(root, 0)


@pytest.fixture(scope="module")
def divided(folder, tmp_path_factory):
    """Returns (results of every rank, holders of each layout, checkpoint that the first layout left)."""
    checkpoint = tmp_path_factory.mktemp("saved") / "step_1"
    results = run_ranks(layouts, RANKS, folder, checkpoint)
    return [out for out, _ in results], results[0][1], checkpoint


@pytest.fixture(scope="module")
def one_rank(folder, divided):
    """Runs the same on one rank, which loads the save of four ranks."""
    return run_ranks(steps, 1, folder, divided[2], CASES)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_sequence_parallel_updates_are_those_of_one_rank(divided, one_rank, layout):
    results, want = divided[0], one_rank[0]
    for key in CASES_OF[layout]:
        gradients, weights, metrics, logp, entropy, _ = results[0][layout][0][key]
        assert len(gradients) == len(want[key][0]) == (2 if key[0] == "many" else 1)
        for a, b in zip(want[key][0], gradients, strict=True):
            assert relative(a, b) < EXACT, key
        assert relative(want[key][1], weights) < EXACT, key
        for name in ("grad_norm", "lr"):
            assert abs(metrics[name] - want[key][2][name]) < EXACT, (key, name)
        assert all(results[r][layout][0][key][2] == metrics for r in range(RANKS))
        for rank in range(RANKS):
            for place, whole in ((3, want[key][3]), (4, want[key][4])):
                for sequence, x in results[rank][layout][0][key][place].items():
                    assert (x - whole[sequence]).abs().max() < EXACT, (key, rank, sequence)
    norms = {key: value[2]["grad_norm"] for key, value in want.items()}
    assert min(norms.values()) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_ranks_of_one_position_hold_the_planned_share(divided, layout):
    results, holders, _ = divided
    positions = len(holders[layout])
    assert holders[layout].shape == ((1, 4) if layout == "sp4" else (2, 2))
    for name, budget in CASES_OF[layout]:
        everyone = synthetic_batch(*BATCHES[name])
        work = torch.tensor([len(t.tokens) for t in everyone])
        plan = assign_balanced(work, torch.tensor([t.position % 2 for t in everyone]), positions)
        for position, ranks in enumerate(holders[layout].tolist()):
            planned = {(t.position, t.sample): t.tokens for t, p in zip(everyone, plan, strict=True) if p == position}
            for rank in ranks:
                held = results[rank][layout][0][name, budget][5]
                assert held.keys() == planned.keys() and all(torch.equal(held[k], planned[k]) for k in planned)
        if name == "one" and positions == 2:
            assert not results[holders[layout][1][0]][layout][0][name, budget][5]


def test_resume_checkpoints_and_buckets_cross_sequence_parallel_layouts(divided, one_rank):
    results = divided[0]
    saved = results[0]["sp4"][2]
    for _, same, loaded, (metrics, after) in [results[0][layout] for layout in LAYOUTS] + [one_rank]:
        assert len(same) > 20 and all(same)
        assert all(torch.equal(loaded[n], saved[n]) for n in saved)
        # The step after shows that AdamW's moments came along.
        want = results[0]["sp4"][3]
        assert relative(want[1], after) < EXACT and abs(metrics["grad_norm"] - want[0]["grad_norm"]) < EXACT


# ── what is refused, and what runs in lockstep ───────────────────────────────


def refusals(world, folder, odd):
    """Returns the messages of refusals, the models built before them, and the history of a right program."""
    four = world_of(world, {"sp": 4})
    built, messages = [], []
    build = fsdp.empty_model
    fsdp.empty_model = lambda *_: built.append(1)
    try:
        build_policy(settings(odd), four)
    except ValueError as error:
        messages.append(str(error))
    fsdp.empty_model = build
    policy = build_policy(settings(folder), four)
    try:
        policy.logprobs(from_episodes(synthetic_batch(1, 1 + world.rank)), 1.0)
    except AssertionError as error:
        messages.append(str(error))
    # A right program, watched.
    policy.model.zero_grad()
    two = world_of(world, {"sp": 2})
    cfg = settings(folder)
    cfg.run.lockstep_debug = True
    policy = build_policy(cfg, two)
    with Lockstep(world.store, timeout=20.0) as recorder:
        update(policy, share_of(two, BATCHES["three"]), two)
    return messages, built, recorder.history


def test_lockstep_and_refusals(folder, tmp_path):
    odd = small_model(tmp_path, num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    for messages, built, history in run_ranks(refusals, RANKS, folder, odd):
        assert built == [] and len(messages) == 2
        assert (
            "--parallel.sp 4: must divide the model's 6 attention heads (the number of its key-value heads, 3, does not"
            in messages[0]
        )
        assert messages[0].endswith("sp could be 1, 2, 3, 6")
        assert "different sequences" in messages[1]
        assert sum("ulysses.py" in line and "alltoall" in line for line in history) >= 8


def wait_alone(world):
    """Returns the seconds until rank 0 gives up on each group where nobody else comes."""
    groups = world_from_group(ParallelConfig(sp=2), 1, world.device, world.rank, timedelta(seconds=0.5))
    seconds = []
    for group in (groups.sp_group, groups.data_group, groups.shard_group, groups.host_group):
        began = time.monotonic()
        if world.rank == 0:
            with pytest.raises(RuntimeError):
                all_reduce(torch.zeros(1), "sum", group)
        seconds.append(time.monotonic() - began)
    if world.rank == 0:
        world.store.set("gave up", "")
    # A rank that left would be noticed sooner.
    world.store.wait(["gave up"])
    return seconds


def test_groups_of_a_mesh_wait_no_longer_than_the_run_allows():
    assert all(0.3 < waited < 10 for waited in run_ranks(wait_alone, RANKS)[0])


@pytest.mark.parametrize(
    ("kind", "changes", "sp", "parts"),
    [
        ("Qwen2Config", {}, 3, ["--parallel.sp 3", "4 attention heads", "1, 2, 4"]),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            2,
            ["dynamic"],
        ),
        ("Qwen3NextConfig", {}, 2, ["--parallel.sp 2", "linear_attention"]),
    ],
)
def test_a_model_that_sp_cannot_divide_is_refused(kind, changes, sp, parts):
    with pytest.raises(ValueError) as error:
        check_config(getattr(transformers, kind)(**SMALL | changes), sp)
    assert all(part in str(error.value) for part in parts)


def test_any_number_of_kv_heads_is_accepted():
    for heads, kv, sp in ((4, 1, 4), (12, 6, 4), (28, 4, 14), (6, 3, 2)):
        check_config(transformers.Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv), sp)
