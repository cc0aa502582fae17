"""Adapters: laws 2 and 5 with them, a reference that costs nothing, and checkpoints that PEFT opens."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.checkpoint.store import find_resume, load
from spmdrl.config.engines import pushed_parts
from spmdrl.data.episode import episode_of
from spmdrl.data.pack import from_episodes
from spmdrl.data.tree import prompt_lengths
from spmdrl.engines.engine import Request, StaleEngineError
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.hub.lora import linear_names
from spmdrl.policy.fsdp.lora import BaseOf, gathered
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models, build_models
from spmdrl.rl.compose import compose
from spmdrl.session.device_table import Memory
from spmdrl.session.transfer import Transfer
from spmdrl.tracking.metrics import Timer
from spmdrl.weights.reshard import CorruptWeightsError, Reshard, catalogue
from tests.ranks.cases import (
    build_policy,
    config,
    float64_softmax,
    packed,
    relative,
    small_model,
    synthetic_batch,
    update_models,
    update_once,
)
from tests.ranks.demo import STEPS, metrics, train_demo, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_placement import DOUBLE, split, split_demo
from tests.ranks.test_shared_prompts import float64_norm
from tests.saving import save

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
EXACT, WHOLE = 1e-10, 1 << 20
LORA = {"rank": 3, "alpha": 10}
LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def model(folder: Path, seed: int = 0) -> str:
    """Makes a model that can be saved, because it has a tokenizer."""
    small_model(folder, seed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model(tmp_path_factory.mktemp("lora") / "model")


def adapted(cfg, world) -> FsdpPolicy:
    return FsdpPolicy(cfg, world, 100, adapt=True)


def halves(policy, of=lambda p: p) -> tuple[dict, dict]:
    """Returns whole (weights of the model, weights of its adapters). Collective."""
    return tuple(gathered_of(policy, of, lora) for lora in (False, True))


def gathered_of(policy, of, lora: bool) -> dict:
    named = [(n, of(p)) for n, p in policy.named_weights() if ("lora_" in n) is lora]
    # Vectors as matrices of one column.
    flat = gathered([(n, p if p.dim() > 1 else p.view(-1, 1)) for n, p in named], policy.world)
    return {n: x.clone() for n, x in flat.items()}


@torch.no_grad()
def shake(policy, size: float = 0.1) -> None:
    """Changes the adapters, the same on every rank and on any number of them."""
    from spmdrl.weights.shards import local, shard_box

    for i, (name, p) in enumerate(policy.named_weights()):
        if "lora_" in name:
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i + policy.version), dtype=p.dtype)
            first, last = shard_box(p)[0]
            local(p).add_(size * noise[first:last])
    policy.version += 1


# ── law 2 ────────────────────────────────────────────────────────────────────


def learned(world, folder, preset, share, budget):
    """Returns adapters at the start and at the end, gradients of two optimizer steps, the weights beneath, metrics."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = float64_norm
    cfg = config(
        model={"path": folder, "dtype": "float64"},
        lora=LORA,
        algo={"preset": preset, "updates_per_step": 2, "kl_coef": 0.1},
        policy={"share_prompts": share, "max_tokens_per_microbatch": budget},
        parallel={"sp": world.sp_size, "dp_replicate": world.mesh["dp_replicate"].size()},
    )
    policy = adapted(cfg, world)
    (beneath, start), gradients = halves(policy), []
    everyone = synthetic_batch(6, 4)
    batch = packed(cfg, world, everyone)
    if share:
        batch.seq["common"] = prompt_lengths(batch.lengths, batch.token["mask"])
    policy.optimizer.register_step_pre_hook(lambda *_: gradients.append(gathered_of(policy, lambda p: p.grad, True)))
    numbers = update_models(cfg, world, Models(policy, BaseOf(policy)), everyone, batch)
    after, end = halves(policy)
    same = all(torch.equal(beneath[n], after[n]) for n in beneath)
    moments = {tuple(p.shape) for p in policy.optimizer.state}
    trains = sorted(n for n, p in policy.named_weights() if p.requires_grad)
    return start, gradients, end, same, moments, trains, numbers


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_layout_adapters_learn_the_same(folder, preset):
    want, *_ = run_ranks(learned, 1, folder, preset, False, WHOLE)
    start, gradients, end, same, moments, trains, numbers = want
    # B starts at 0, so that A has a gradient from the second step on.
    assert len(gradients) == 2 and all(g.any() for n, g in gradients[0].items() if "lora_B" in n)
    assert not any(g.any() for n, g in gradients[0].items() if "lora_A" in n)
    assert all(g.any() for g in gradients[1].values())
    assert numbers["grad_norm"] > 1e-3 and numbers["kl/mean"] >= 0
    assert same and trains == sorted(start) and len(start) == 2 * 7 * 2
    assert {s[0] for s in moments} | {s[1] for s in moments} >= {3} and all(3 in s for s in moments)
    for ranks, options, share, budget in (
        (1, {}, True, 31),
        (2, {}, False, 31),
        (2, {}, True, 70),
        (2, {"sp": 2}, True, WHOLE),
        (4, {"dp_replicate": 2}, False, WHOLE),
    ):
        got, *_ = run_ranks(learned, ranks, folder, preset, share, budget, **options)
        assert all(torch.equal(start[n], got[0][n]) for n in start), "A hangs on the seed alone"
        for a, b in zip(gradients, got[1], strict=True):
            assert relative(a, b) < EXACT, (ranks, options, share, budget)
        assert relative(end, got[2]) < EXACT and got[3] and got[5] == trains
        assert abs(got[6]["loss"] - numbers["loss"]) < 1e-9


def started(world, folder, seed):
    cfg = config(model={"path": folder, "dtype": "bfloat16"}, lora=LORA, run={"seed": seed})
    policy = adapted(cfg, world)
    dtypes = {("lora_" in n, p.dtype) for n, p in policy.named_weights()}
    return dtypes, halves(policy)[1]


def test_adapters_start_as_in_peft_and_weights_beneath_are_in_the_type_of_the_forward(folder):
    dtypes, one = run_ranks(started, 1, folder, 0)[0]
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    for name, x in one.items():
        if "lora_B" in name:
            assert not x.any()
        else:
            bound = x.shape[1] ** -0.5
            assert 0.8 * bound < x.abs().max() <= bound and x.std() == pytest.approx(bound / 3**0.5, rel=0.3)
    other = run_ranks(started, 1, folder, 1)[0][1]
    assert not any(torch.equal(one[n], other[n]) for n in one if "lora_A" in n)


# ── the reference ────────────────────────────────────────────────────────────


def referred(world, folder, dtype):
    """Compares the free reference with a frozen model, before and after the adapters changed."""
    cfg = config(model={"path": folder, "dtype": dtype}, lora=LORA, algo={"kl_coef": 0.1})
    models = build_models(cfg, world, compose(cfg).needs)
    frozen = build_policy(cfg, world, trainable=False)
    batch = packed(cfg, world, synthetic_batch())
    want = frozen.logprobs(batch, 0.7)
    seen = []
    for _ in range(2):
        policy = models.policy.logprobs(batch, 0.7)[0]
        got = models.reference.logprobs(batch, 0.7)
        seen.append((all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), (policy - want[0]).abs().max()))
        shake(models.policy)
    memory = Memory(cfg, models, None, Timer(), world)
    return type(models.reference).__name__, seen, memory.owners, list(models.saved())


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_reference_is_the_model_beneath_exactly_and_takes_no_memory(folder, ranks, dtype):
    for kind, ((first, none), (second, some)), owners, saved in run_ranks(referred, ranks, folder, dtype):
        assert kind == "BaseOf" and first and second
        assert none == 0 and some > 0.05
        assert not [owner for owner in owners if "reference" in owner] and saved == []


# ── law 5 ────────────────────────────────────────────────────────────────────


def sampled(engine, policy, world) -> float:
    """Returns largest |dlogp| of fresh samples, engine against trainer."""
    requests = [Request((world.rank, i), [1, 5, 6 + i], 9 + i, policy.version, 8) for i in range(4)]
    for request in requests:
        engine.submit(request)
    done, episodes, told = [], [], []
    while len(done) < 4:
        done += engine.poll()
    for c in sorted(done, key=lambda c: c.key):
        prompt = requests[c.key[1]].prompt
        mask = torch.tensor([False] * 3 + [True] * len(c.tokens))
        logp = torch.tensor([0.0] * 3 + c.logp, dtype=torch.float64)
        told.append(logp)
        episodes.append(episode_of(0, c.key[1], 0, torch.tensor(prompt + c.tokens), mask, logp, version=policy.version))
    batch = from_episodes(episodes)
    return (policy.logprobs(batch, 1.0)[0].double() - torch.cat(told)).abs().max().item()


def pushed(world, folder, dtype, push, level):
    """Returns agreement, bytes and versions of a run after 0, 1, 2 changes of the adapters."""
    cfg = config(model={"path": folder, "dtype": dtype}, lora=LORA | {"push": push}, rollout={"sleep_level": level})
    policy, engine = adapted(cfg, world), HFEngine(cfg, world, {2})
    memory, rows = Memory(cfg, Models(policy), engine, Timer(), world), []
    with float64_softmax():
        for _ in range(3):
            with memory.rollout_phase():
                report = memory.last_push
                rows.append((engine.version, report.version, report.bytes, report.deep, sampled(engine, policy, world)))
            with memory.training_phase():
                shake(policy)
    width = torch.empty((), dtype=engine.dtype).element_size()
    sizes = {kind: 0 for kind in (True, False)}
    for name, p in policy.named_weights():
        sizes["lora_" in name] += p.numel() * width
    return rows, sizes[False], sizes[True]


@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("push", ["adapter", "merged"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parity_after_each_push_and_only_adapters_travel(folder, ranks, push, dtype, within):
    for rows, model, adapters in run_ranks(pushed, ranks, folder, dtype, push, 1):
        whole, later = (model + adapters, adapters) if push == "adapter" else (model, model)
        assert [row[2] for row in rows] == [whole, later, later]
        for k, (version, told, _, deep, difference) in enumerate(rows):
            assert version == told == k and deep
            assert difference < within, (k, difference)


def test_stale_after_a_deep_sleep_everything_travels_again(folder):
    for rows, model, adapters in run_ranks(pushed, 2, folder, "float32", "adapter", 2):
        assert [row[2] for row in rows] == [model + adapters] * 3
        assert max(row[4] for row in rows) < 1e-5


def tampered(world, folder, how):
    """Corrupts a push of adapters on every rank; returns the engine's messages, also after an intact push."""
    cfg = config(model={"path": folder}, lora=LORA)
    policy, engine = adapted(cfg, world), HFEngine(cfg, world, {2})
    transfer = Transfer(world, policy, engine, torch.float32, 1 << 14, pushed_parts(cfg))
    transfer.push(0)
    shake(policy)
    small, load = transfer.push(1).bytes, engine.load

    def wrong(buckets, version):
        def given():
            for bucket in buckets:
                name = next(iter(bucket))
                assert "lora_" in name
                if how == "lost":
                    del bucket[name]
                elif how == "changed":
                    bucket[name] = bucket[name] + 1e-3
                yield bucket
                if how == "interrupted":
                    raise ConnectionError("the other node is gone")

        load(given(), version)

    shake(policy)
    if how == "beneath":
        with torch.no_grad():
            engine.model.get_output_embeddings().weight[3, 3] += 1e-3
    else:
        engine.load = wrong
    said = ""
    try:
        transfer.push(2)
    except (CorruptWeightsError, ConnectionError) as error:
        said = str(error)
    refused = []
    for version in (1, 2):
        try:
            engine.submit(Request((0, 0), [1], 0, version, 1))
        except StaleEngineError as error:
            refused.append(str(error))
    engine.load = load
    again = transfer.push(2)
    return said, refused, small, again.bytes, again.deep, sampled(engine, policy, world)


@pytest.mark.parametrize("how", ["changed", "lost", "interrupted", "beneath"])
def test_stale_adapters_that_went_wrong_are_refused(folder, how):
    for said, refused, small, again, deep, difference in run_ranks(tampered, 2, folder, how):
        assert said == "the other node is gone" if how == "interrupted" else "does not contain version 2" in said
        assert len(refused) == 2 and all("holds no weights" in text for text in refused)
        assert again > 3 * small and deep and difference < 1e-5, "what mends it is a push of everything"


# ── checkpoints ──────────────────────────────────────────────────────────────


def settings(folder, world, **lora):
    return config(
        model={"path": folder},
        lora=LORA | lora,
        optimizer={"lr": 1e-2, "clip_grad_norm": 1.0, "warmup_steps": 3},
        parallel={"dp_replicate": world.mesh["dp_replicate"].size()},
    )


def step(cfg, world, policy):
    numbers = update_once(cfg, world, policy, None, synthetic_batch())
    return numbers, halves(policy)[1]


def train_and_save(world, folder, root):
    cfg = settings(folder, world)
    policy = adapted(cfg, world)
    for _ in range(2):
        step(cfg, world, policy)
    save(Path(root), 2, Models(policy), {"version": 2}, None, world)
    return halves(policy)[1], step(cfg, world, policy)


def go_on(world, folder, root, lora):
    cfg = settings(folder, world, **lora)
    policy = adapted(cfg, world)
    load(find_resume(Path(root), world), Models(policy))
    policy.version = policy.updates_done = policy.updates_due = 2
    return halves(policy)[1], step(cfg, world, policy)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """(root of the checkpoints, adapters at the save, what the step after gave), by two ranks."""
    root = tmp_path_factory.mktemp("saved")
    at_save, after = run_ranks(train_and_save, 2, folder, str(root))[0]
    return root, at_save, after


@pytest.mark.parametrize(("n", "replicate"), [(2, 1), (1, 1), (4, 2)])
def test_resume_of_adapters(folder, saved, n, replicate):
    root, at_save, (numbers, weights) = saved
    loaded, (got, after) = run_ranks(go_on, n, folder, str(root), {}, dp_replicate=replicate)[0]
    assert all(torch.equal(loaded[name], at_save[name]) for name in at_save)
    if n == 2:
        assert got == numbers and all(torch.equal(after[name], weights[name]) for name in weights)
    assert abs(got["loss"] - numbers["loss"]) < 1e-6 and abs(got["grad_norm"] - numbers["grad_norm"]) < 1e-5
    # Without its moments AdamW would step by lr: 1e-2.
    assert max((after[name] - weights[name]).abs().max() for name in weights) < 1e-4


@pytest.mark.parametrize(
    ("lora", "seed", "message"),
    [
        ({"rank": 4}, 0, "made with --lora.rank 3, but this run has 4"),
        ({"alpha": 3}, 0, "made with --lora.alpha 10"),
        ({"targets": ("q_proj",)}, 0, "made with --lora.targets"),
        ({"rank": 0}, 0, "has adapters: resume with its --lora.rank"),
        ({}, 1, "whose weights differ from those in"),
    ],
)
def test_resume_with_other_adapters_or_another_model_is_refused(saved, folder, tmp_path, lora, seed, message):
    path = model(tmp_path / "model", seed) if seed else folder
    with pytest.raises(RankError, match=message):
        run_ranks(go_on, 1, path, str(saved[0]), lora)


def merged_here(world, folder, root, lora=LORA):
    """Gathers the full model as it is pushed, whole on every rank, in float64."""
    cfg = config(model={"path": folder, "dtype": "float64"}, lora=lora)
    policy = adapted(cfg, world)
    shake(policy)
    policy.optimizer = None  # Its state is not looked at.
    policy.save(Path(root))
    pieces = policy.pieces()
    entries = catalogue(pieces, world.host_group)
    needs = [(i, entry.box) for i, entry in enumerate(entries)]
    plan = Reshard(entries, pieces, needs, world.host_group, world.device, torch.float64, 1 << 14)
    return {name: x.clone() for bucket in plan.run(policy.pieces()) for name, x in bucket.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_adapters_open_in_peft_and_merge_to_what_is_pushed(folder, tmp_path, ranks):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (tmp_path / "state").mkdir()
    ours = run_ranks(merged_here, ranks, folder, str(tmp_path))[0]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    start = {n: p.detach().clone() for n, p in base.named_parameters()}
    peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert peft.peft_config["default"].r == 3 and peft.peft_config["default"].lora_alpha == 10
    tokens = torch.tensor([[1, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        logits = peft(tokens).logits
        full = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert (full(tokens).logits - logits).abs().max() < 1e-12
    theirs = {n: p.detach() for n, p in peft.merge_and_unload().named_parameters()}
    opened = {n: p.detach() for n, p in full.named_parameters()}
    assert ours.keys() == theirs.keys() == opened.keys() == start.keys()
    for name, x in theirs.items():
        assert (ours[name] - x).abs().max() < 1e-14, name
        assert torch.equal(ours[name], opened[name])
        assert (name.rpartition(".")[0].rpartition(".")[2] in LINEAR and "weight" in name) == (
            not torch.equal(x, start[name])
        )


# ── runs ─────────────────────────────────────────────────────────────────────

DEMO = {"lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 5e-3}, "eval": {"every": 0}, "model": DOUBLE}
"""Settings of the demo with adapters. All is in float64 but HF's norms and the samples' logp: these large steps make a
model that rounds in float32 by up to 1.5e-5 of a token's logp, in HF's own forward too."""


@pytest.fixture(scope="module")
def demo_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    saving = DEMO | {"checkpoint": {"every": 2, "keep": 1, "at_end": False}}
    run_ranks(train_demo, 2, str(folder / "whole"), saving)
    run_ranks(train_demo, 2, str(folder / "broken"), saving, 2)
    began = run_ranks(train_demo, 2, str(folder / "broken"), saving)
    assert [b[0] for b in began] == [2, 2]
    return untimed(metrics(folder / "whole")), untimed(metrics(folder / "broken"))


def test_resume_of_a_run_with_adapters_goes_on_as_if_it_had_not_stopped(demo_rows):
    whole, broken = demo_rows
    assert len(whole) == STEPS and whole == broken
    assert whole[-1]["kl/mean"] > 1e-4


def test_parity_of_merged_and_unmerged_adapters_while_they_learn(demo_rows):
    rows, _ = demo_rows
    assert len(rows) == STEPS and rows[-1]["kl/mean"] > 1e-4
    assert max(row["logp_diff/max"] for row in rows) < 1e-6


@pytest.mark.parametrize("parallel", [split(1), split(1, 1)])
def test_layout_adapters_under_split_placement(demo_rows, tmp_path, parallel):
    ranks = 2 + parallel["scoring_ranks"]
    got = run_ranks(split_demo, ranks, str(tmp_path / "run"), parallel, DEMO)
    reference = "RemotePolicy" if parallel["scoring_ranks"] else "BaseOf"
    assert got[0]["models"] == {"policy": "FsdpPolicy", "reference": reference} and got[-1]["models"] == {}
    for a, b in zip(demo_rows[0], untimed(metrics(tmp_path / "run")), strict=True):
        for name in ("loss", "kl/mean", "grad_norm", "reward/mean", "entropy/mean"):
            assert abs(a[name] - b[name]) <= 1e-8 * max(1.0, abs(a[name])), (a["step"], name)
        assert b["logp_diff/max"] < 1e-6


# ── targets ──────────────────────────────────────────────────────────────────


def test_targets_are_linear_layers_of_the_decoder(folder, tmp_path):
    from transformers import Qwen3MoeConfig

    assert linear_names(Path(folder), False, ("all-linear",)) == LINEAR
    assert linear_names(Path(folder), False, ("v_proj", "q_proj")) == ["q_proj", "v_proj"]
    for name in ("lm_head", "embed_tokens", "w1"):
        with pytest.raises(ValueError, match=f"--lora.targets {name}: no linear layer .* q_proj, k_proj, v_proj"):
            linear_names(Path(folder), False, ("q_proj", name))
    moe = Qwen3MoeConfig(
        vocab_size=47, hidden_size=32, num_hidden_layers=2, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[1]
    )
    moe.architectures = ["Qwen3MoeForCausalLM"]
    moe.save_pretrained(tmp_path)
    names = linear_names(tmp_path, False, ("all-linear",))
    assert {"q_proj", "gate_proj"} <= set(names) and "experts" not in names
    with pytest.raises(ValueError, match="experts packed into one parameter take no adapter"):
        linear_names(tmp_path, False, ("experts",))


def test_attaching_leaves_torchs_generator_alone(folder):
    from spmdrl.hub.lora import attach

    hf = build_model(Path(folder), "float32")
    torch.manual_seed(4)
    before = torch.get_rng_state()
    attach(hf, config(lora=LORA).lora, 0, torch.float32)
    assert torch.equal(before, torch.get_rng_state())
