"""The science against verl 0.9.1's numbers, and law 2: cutting and ordering a batch change no loss and no gradient."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_KINDS,
    LOSSES,
    PRESETS,
    LossInputs,
    Totals,
    count_totals,
    kl_estimate,
    token_weights,
)

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "verl_0.9.1.json"
CASES = json.loads(GOLDEN.read_text())["cases"] if GOLDEN.exists() else []
case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
golden = pytest.mark.skipif(not CASES, reason=f"golden vectors of verl 0.9.1 not found at {GOLDEN}")
CLOSE = {"rtol": 0, "atol": 1e-8}
VANILLA = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def padded(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pack(case: dict) -> dict[str, torch.Tensor]:
    """The padded golden inputs as one packed batch, without the padding."""
    mask_BT = padded(case["inputs"]["mask"]).bool()
    packed = {name: padded(case["inputs"][name])[mask_BT] for name in ("old", "new", "ref", "rollout", "adv")}
    packed["seq"] = torch.nonzero(mask_BT)[:, 0]
    packed["mask"] = torch.ones(len(packed["seq"]), dtype=torch.bool)
    return packed


def golden_loss(case: dict, loss: str, mode: str, weights=None, **settings):
    """Loss and gradient with respect to the current logp, padded again."""
    mask_BT = padded(case["inputs"]["mask"]).bool()
    p = pack(case)
    logp = p["new"].requires_grad_()
    x = LossInputs(logp, p["old"], p["adv"], p["mask"], p["seq"], weights=weights)
    loss_T, _ = LOSSES[loss](x, **settings)
    # verl's normaliser of seq-mean-token-sum-norm is the width of the padded mask.
    weights_T = token_weights(mode, p["mask"], p["seq"], count_totals(p["mask"], p["seq"]), horizon=mask_BT.shape[1])
    value = (loss_T * weights_T).sum()
    (grad_T,) = torch.autograd.grad(value, logp)
    grad_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    grad_BT[mask_BT] = grad_T
    return value.detach(), grad_BT


@golden
@case
@pytest.mark.parametrize("name, entry", [("grpo", "grpo"), ("dr_grpo", "dr_grpo_nostd"), ("rloo", "rloo")])
def test_parity_verl_advantages(case, name, entry):
    inputs = case["inputs"]
    advantage_B = ADVANTAGES[name](padded(inputs["rewards"]).sum(1), torch.tensor(inputs["group"]))
    expected_BT = padded(case["advantages"][entry]["advantages"])
    torch.testing.assert_close(advantage_B[:, None] * padded(inputs["mask"]), expected_BT, **CLOSE)


@golden
@case
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parity_verl_ppo_clip(case, mode):
    expected = case["losses"][f"vanilla_0.2_0.28_dual3/{mode}"]
    value, grad_BT = golden_loss(case, "ppo_clip", mode, **VANILLA)
    assert value.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8)
    torch.testing.assert_close(grad_BT, padded(expected["grad"]), **CLOSE)


@golden
@case
def test_parity_verl_ppo_clip_with_importance_weights(case):
    expected = case["losses"]["vanilla_is_weighted/token-mean"]
    weights = padded(case["rollout_correction"]["tis_token_2"])[padded(case["inputs"]["mask"]).bool()]
    value, grad_BT = golden_loss(case, "ppo_clip", "token-mean", weights, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert value.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8)
    torch.testing.assert_close(grad_BT, padded(expected["grad"]), **CLOSE)


@golden
@case
def test_parity_verl_reinforce(case):
    expected = case["losses"]["gpg/token-mean"]  # verl's name for -A logp; it has golden numbers for token-mean only
    value, grad_BT = golden_loss(case, "reinforce", "token-mean")
    assert value.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8)
    torch.testing.assert_close(grad_BT, padded(expected["grad"]), **CLOSE)


@golden
@case
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_reinforce_matches_the_padded_formula(case, mode):
    mask_BT, adv_BT = padded(case["inputs"]["mask"]), padded(case["inputs"]["adv"])
    logp_BT = padded(case["inputs"]["new"]).requires_grad_()
    loss_BT = -adv_BT * logp_BT * mask_BT
    expected = {
        "token-mean": loss_BT.sum() / mask_BT.sum(),
        "seq-mean-token-sum": loss_BT.sum(1).mean(),
        "seq-mean-token-mean": (loss_BT.sum(1) / mask_BT.sum(1)).mean(),
        "seq-mean-token-sum-norm": loss_BT.sum(1).mean() / mask_BT.shape[1],
    }[mode]
    expected.backward()
    value, grad_BT = golden_loss(case, "reinforce", mode)
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad_BT, logp_BT.grad, rtol=0, atol=1e-12)


@golden
@case
@pytest.mark.parametrize("kind", KL_KINDS)
def test_parity_verl_kl(case, kind):
    expected, mask_BT = case["kl"][kind], padded(case["inputs"]["mask"])
    logp_BT = padded(case["inputs"]["new"]).requires_grad_()
    # The estimate is elementwise, so a padded tensor serves as well as a packed one.
    kl_BT = kl_estimate(kind, logp_BT, padded(case["inputs"]["ref"]))
    (grad_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
    expected_kl_BT, expected_grad_BT = padded(expected["kl"]), padded(expected["grad"])
    torch.testing.assert_close(kl_BT.detach() * mask_BT, expected_kl_BT * mask_BT, **CLOSE)
    torch.testing.assert_close(grad_BT * mask_BT, expected_grad_BT * mask_BT, **CLOSE)


def test_kl_clamps_and_mask():
    logp = torch.tensor([-50.0, -3.0, -1.0, math.nan], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -1.0, -math.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    for kind in KL_KINDS:
        kl = kl_estimate(kind, logp, ref, mask)
        (grad,) = torch.autograd.grad(kl.sum(), logp)
        assert kl[3] == 0 and grad[3] == 0 and kl.isfinite().all() and grad.isfinite().all(), kind
    expected = torch.tensor([10.0, math.exp(2) - 3, 0.0], dtype=torch.float64)  # exp(49) - 50 is clamped to 10
    torch.testing.assert_close(kl_estimate("k3", logp, ref, mask)[:3].detach(), expected)
    with pytest.raises(ValueError, match="k3"):
        kl_estimate("k4", logp, ref)


def test_advantages_against_plain_python():
    reward = torch.tensor([1.0, 3.0, 2.0, 5.0, 0.5, 0.5, 8.0])
    group = torch.tensor([7, 7, 7, 7, 40, 40, 3])  # two and more, equal rewards, one alone; numbering with gaps
    std = math.sqrt(sum((r - 2.75) ** 2 for r in (1, 3, 2, 5)) / 3) + 1e-6
    expected = {
        "grpo": [-1.75 / std, 0.25 / std, -0.75 / std, 2.25 / std, 0, 0, 8 / (1 + 1e-6)],
        "dr_grpo": [-1.75, 0.25, -0.75, 2.25, 0, 0, 8],
        "rloo": [1 - 10 / 3, 3 - 8 / 3, 2 - 9 / 3, 5 - 6 / 3, 0, 0, 8],
        "reinforce": [r - 20 / 7 for r in reward.tolist()],
    }
    for name, advantage in ADVANTAGES.items():
        torch.testing.assert_close(advantage(reward, group), padded(expected[name]), rtol=0, atol=1e-12, msg=name)
    torch.testing.assert_close(ADVANTAGES["reinforce"](reward, group, baseline="none"), reward.double())


def test_advantages_refuse_what_is_broken():
    with pytest.raises(ValueError, match=r"\[1\]"):
        ADVANTAGES["grpo"](torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="both be"):
        ADVANTAGES["rloo"](torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="baseline"):
        ADVANTAGES["reinforce"](torch.zeros(1), torch.zeros(1, dtype=torch.int64), baseline="group")
    for name, advantage in ADVANTAGES.items():
        assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,), name


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    name=st.sampled_from(sorted(ADVANTAGES)),
)
def test_layout_advantages_do_not_see_the_order_of_samples(seed, sizes, name):
    rng = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.randperm(50, generator=rng)[: len(sizes)], torch.tensor(sizes))
    reward = torch.randn(len(group), generator=rng)
    order = torch.randperm(len(group), generator=rng)
    advantage = ADVANTAGES[name](reward, group)
    assert torch.equal(ADVANTAGES[name](reward[order], group[order]), advantage[order])  # bit for bit


def batch_loss(batch: dict, sequences: torch.Tensor, totals: Totals, loss: str, mode: str):
    """Loss and gradient per token of `sequences`, packed in that order as one micro-batch."""
    index = torch.cat([torch.nonzero(batch["seq"] == s).flatten() for s in sequences])
    lengths = torch.stack([(batch["seq"] == s).sum() for s in sequences])
    part = {name: tensor[index] for name, tensor in batch.items()}
    part["seq"] = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    logp = part["logp"] = part["logp"].clone().requires_grad_()
    x = LossInputs(**part)
    loss_T, stats = LOSSES[loss](x)
    assert all(s.shape == logp.shape and not s.requires_grad and (s[~x.mask] == 0).all() for s in stats.values())
    value = (loss_T * token_weights(mode, x.mask, x.seq, totals, horizon=12)).sum()
    (grad,) = torch.autograd.grad(value, logp)
    return value.detach(), torch.zeros(len(batch["seq"]), dtype=torch.float64).index_copy(0, index, grad)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(1, 4),
    loss=st.sampled_from(sorted(LOSSES)),
    mode=st.sampled_from(AGGREGATIONS),
)
def test_layout_microbatches_and_order_do_not_change_loss_or_gradient(seed, lengths, parts, loss, mode):
    rng = torch.Generator().manual_seed(seed)
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(len(seq), generator=rng) < 0.7  # some sequences end up without a single unmasked token
    noise = {
        name: torch.randn(len(seq), generator=rng, dtype=torch.float64) for name in ("logp", "old_logp", "advantages")
    }
    batch = noise | {"mask": mask, "seq": seq, "weights": torch.rand(len(seq), generator=rng, dtype=torch.float64)}
    for name in (*noise, "weights"):  # what stands at masked positions must not matter
        batch[name] = torch.where(mask, batch[name], torch.tensor((math.nan, -math.inf))[seed % 2])
    per_seq = torch.zeros(len(lengths)).index_add(0, seq, mask.float())
    totals = Totals(tokens=float(mask.sum()), sequences=float((per_seq > 0).sum()))
    assert count_totals(mask, seq) == totals

    value, grad = batch_loss(batch, torch.arange(len(lengths)), totals, loss, mode)
    pieces = [p for p in torch.randperm(len(lengths), generator=rng).chunk(parts) if len(p)]
    values, grads = zip(*(batch_loss(batch, p, totals, loss, mode) for p in pieces), strict=True)
    torch.testing.assert_close(sum(values), value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sum(grads), grad, rtol=1e-10, atol=1e-10)
    assert value.isfinite() and grad.isfinite().all() and (grad[~mask] == 0).all()


def inputs(logp, old, adv, mask=None) -> LossInputs:
    logp, old, adv = (torch.tensor(v, dtype=torch.float64) for v in (logp, old, adv))
    mask = torch.ones(len(logp), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return LossInputs(logp.requires_grad_(), old, adv, mask, torch.zeros(len(logp), dtype=torch.int64))


def test_ppo_clip_by_hand():
    logs = [math.log(r) for r in (1.0, 1.5, 1.5, 0.5, 0.5, 5.0, 5.0)]
    adv = [2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 2.0]
    x = inputs(logs, [0.0] * 7, adv)
    loss, stats = LOSSES["ppo_clip"](x, **VANILLA)
    torch.testing.assert_close(loss, padded([-2.0, -2.56, 3.0, -1.0, 1.6, 6.0, -2.56]))
    assert stats["clip_fraction"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert stats["dual_clip_fraction"].tolist() == [0, 0, 0, 0, 0, 1, 0]
    torch.testing.assert_close(stats["ratio"], padded([1.0, 1.5, 1.5, 0.5, 0.5, 5.0, 5.0]))
    torch.testing.assert_close(stats["old_kl"], -padded(logs))
    (grad,) = torch.autograd.grad(loss.sum(), x.logp)
    torch.testing.assert_close(grad, padded([-2.0, 0, 3.0, -1.0, 0, 0, 0]))  # -A r where nothing clips
    unbounded, _ = LOSSES["ppo_clip"](x, clip_low=0.2, clip_high=0.28)
    assert unbounded[5].item() == pytest.approx(10.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_masked_positions_give_exactly_zero(name, rubbish):
    x = inputs([-1.0, rubbish, -0.5], [-1.1, rubbish, -0.7], [1.0, rubbish, -1.0], [True, False, True])
    loss, stats = LOSSES[name](x)
    (grad,) = torch.autograd.grad(loss.sum(), x.logp)
    assert loss[1] == 0 and grad[1] == 0 and loss.isfinite().all() and grad.isfinite().all()
    assert all(s[1] == 0 and s.isfinite().all() for s in stats.values())
    assert (grad[[0, 2]] != 0).all()


def test_ppo_clip_survives_a_log_ratio_out_of_range():
    x = inputs([0.0, -2000.0], [-2000.0, 0.0], [-1.0, -1.0])
    loss, _ = LOSSES["ppo_clip"](x)
    (grad,) = torch.autograd.grad(loss.sum(), x.logp)
    torch.testing.assert_close(loss, padded([math.exp(20), 0.8]))
    assert grad.tolist() == [0, 0]
    with pytest.raises(ValueError, match="dual_clip"):
        LOSSES["ppo_clip"](x, dual_clip=0.5)


def test_token_weights_say_what_is_wrong():
    mask, seq = torch.tensor([True, False]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="token-mean"):
        token_weights("mean", mask, seq, Totals(1, 1))
    with pytest.raises(ValueError, match="horizon"):
        token_weights("seq-mean-token-sum-norm", mask, seq, Totals(1, 1))
    with pytest.raises(ValueError, match="both be"):
        token_weights("token-mean", mask, seq[:1], Totals(1, 1))
    for mode in AGGREGATIONS:
        assert token_weights(mode, mask[:0], seq[:0], Totals(0, 0), horizon=4).shape == (0,)
        assert token_weights(mode, mask & False, seq, Totals(0, 0), horizon=4).tolist() == [0, 0]
        wrong = token_weights(mode, mask, seq, Totals(0, 0), horizon=4)  # totals that forgot a token are loud
        assert wrong[0].isnan() and wrong[1] == 0


def test_presets_name_what_exists():
    assert set(PRESETS) == {"grpo", "dr_grpo", "rloo", "reinforce"}
    for preset in PRESETS.values():
        assert preset.advantage in ADVANTAGES and preset.loss in LOSSES
        assert preset.aggregation in AGGREGATIONS
        assert preset.paper.startswith("https://")
    assert PRESETS["grpo"].aggregation == "seq-mean-token-mean"
    assert PRESETS["dr_grpo"].aggregation == "seq-mean-token-sum-norm"
    assert [f.name for f in fields(LossInputs)][:5] == ["logp", "old_logp", "advantages", "mask", "seq"]
