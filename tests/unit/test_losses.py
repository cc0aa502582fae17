"""Losses, aggregations and KL against verl 0.9.1's numbers and formulas written out; law 2: cutting and ordering a
batch change no loss and no gradient. A loss joins the tests of every loss by standing in LOSSES.
"""

import inspect
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos.aggregate import AGGREGATIONS, Totals, count_totals, token_weights
from spmdrl.algos.covariance_losses import Selecting
from spmdrl.algos.kl import KL_KINDS, adaptive_coef, kl_estimate
from spmdrl.algos.loss_inputs import LossInputs
from spmdrl.algos.losses import LOSSES, compute_loss, own_loss
from spmdrl.algos.rows import paper_of
from spmdrl.algos.value import dual_step, implicit_reward_loss, implicit_rewards, positive_nll, value_loss
from spmdrl.config.parameters import parameters_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "verl_0.9.1.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
every_loss = pytest.mark.parametrize("name", LOSSES)
CLOSE = {"rtol": 0, "atol": 1e-8}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
ENTRIES = {
    "vanilla_0.2_0.28_dual3": ("ppo", WIDE | {"dual_clip": 3.0}),
    "vanilla_is_weighted": ("ppo", {"dual_clip": 3.0, "weights": "tis_token_2"}),
    "gspo_3e-4_4e-4": ("gspo", {}),
    "gspo_0.1_0.2": ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    "cispo_0.2_0.28": ("cispo", WIDE),
    "sapo_1_1.05": ("sapo", {}),
    "geo_mean_0.2_0.2": ("gmpo", {"clip_low": 0.2, "clip_high": 0.2}),
    "gpg": ("gpg", {}),
    "kl_cov_0.05_c1": ("kl_cov", {"cov_ratio": 0.05}),
    "dppo_tv_0.2_0.28": ("dppo_tv", WIDE),
    "dppo_kl_0.2_0.28": ("dppo_kl", WIDE),
}
"""Golden entry (before the aggregation) -> loss and settings."""


def fp64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def select(name: str, x: LossInputs) -> torch.Tensor | None:
    """Returns the tokens that the loss holds back over the whole batch x; None if it holds back none."""
    if not LOSSES[name].select:
        return None
    draw = torch.rand(len(x.mask), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns = (v.detach().double() for v in (x.logp, x.old_logp, x.advantages))
    share = {"cov_ratio": 0.2} | ({"cov_low": 0.0} if name == "clip_cov" else {})
    return LOSSES[name].select(Selecting(*columns, x.mask, x.seq, int(x.seq.max()) + 1, draw), **share)


# ── golden vectors ───────────────────────────────────────────────────────────


@case
def test_parity_verl_losses(case):
    inputs = {k: fp64(v) for k, v in case["inputs"].items() if k in ("old", "adv", "mask", "new")}
    known = {f"{entry}/{mode}" for entry in ENTRIES for mode in AGGREGATIONS} | ENTRIES.keys()
    assert set(case["losses"]) <= known | {"value_clip0.2/token-mean"}, "a golden loss without a test"
    for entry, expected in case["losses"].items():
        if entry.startswith("value"):
            continue
        name, given_settings = ENTRIES[entry.split("/")[0]]
        options = dict(given_settings)
        if "weights" in options:
            options["weights"] = fp64(case["rollout_correction"][options["weights"]])
        names = (name, "gspo_token") if name == "gspo" else (name, "reinforce") if name == "gpg" else (name,)
        for loss in names:
            logp = inputs["new"].clone().requires_grad_()
            value = compute_loss(
                loss,
                logp=logp,
                old_logp=inputs["old"],
                advantages=inputs["adv"],
                mask=inputs["mask"],
                aggregation=expected["agg"],
                **options,
            )
            value.backward()
            assert value.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8), (entry, loss)
            torch.testing.assert_close(logp.grad, fp64(expected["grad"]), **CLOSE, msg=f"{entry} {loss}")


@case
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parity_verl_packed_without_the_padding(case, mode):
    mask_BT = fp64(case["inputs"]["mask"]).bool()
    logp, old, adv = (fp64(case["inputs"][k])[mask_BT] for k in ("new", "old", "adv"))
    seq, mask = torch.nonzero(mask_BT)[:, 0], torch.ones(int(mask_BT.sum()), dtype=torch.bool)
    loss_T, _ = LOSSES["ppo"].function(LossInputs(logp.requires_grad_(), old, adv, mask, seq), **WIDE, dual_clip=3.0)
    # verl's normaliser of seq-mean-token-sum-norm is the width of the padded mask.
    weights_T = token_weights(mode, mask, seq, count_totals(mask, seq), horizon=mask_BT.shape[1])
    value = (loss_T * weights_T).sum()
    (grad,) = torch.autograd.grad(value, logp)
    expected = case["losses"][f"vanilla_0.2_0.28_dual3/{mode}"]
    assert value.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8)
    torch.testing.assert_close(grad, fp64(expected["grad"])[mask_BT], **CLOSE)


@case
def test_parity_verl_value_loss(case):
    expected, inputs = case["losses"]["value_clip0.2/token-mean"], {k: fp64(v) for k, v in case["inputs"].items()}
    mask, values = inputs["mask"].bool(), inputs["vpred"].requires_grad_()
    returns = inputs["values"] + inputs["adv"]
    loss, stats = value_loss(values, inputs["values"], returns, mask, clip=0.2)  # elementwise, so padded serves too
    loss = loss.sum() / mask.sum()
    (grad,) = torch.autograd.grad(loss, values)
    assert loss.item() == pytest.approx(expected["loss"], rel=0, abs=1e-8)
    torch.testing.assert_close(grad, fp64(expected["grad"]), **CLOSE)
    assert 0 < stats["value_clip_fraction"].sum() < mask.sum()


@case
@pytest.mark.parametrize("kind", CASES[0]["kl"])
def test_parity_verl_kl(case, kind):
    expected, mask_BT = case["kl"][kind], fp64(case["inputs"]["mask"])
    logp_BT = fp64(case["inputs"]["new"]).requires_grad_()
    kl_BT = kl_estimate(kind, logp_BT, case["inputs"]["ref"])
    (grad_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
    torch.testing.assert_close(kl_BT.detach() * mask_BT, fp64(expected["kl"]) * mask_BT, **CLOSE)
    torch.testing.assert_close(grad_BT * mask_BT, fp64(expected["grad"]) * mask_BT, **CLOSE)


# ── formulas written out ─────────────────────────────────────────────────────


def batch(seed: int = 0, rows: int = 5, width: int = 7, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Makes padded inputs with ragged masks, holes and a row of one token included, an advantage of 0, logp below 0."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=rng, dtype=torch.float64) * 3 - 0.5
    mask = torch.rand(rows, width, generator=rng) < 0.7
    mask[:, 0] = True
    mask[1, 1:] = False
    noise = [torch.randn(rows, width, generator=rng, dtype=torch.float64) for _ in range(2)]
    noise[1][2, 0] = 0
    weights = torch.rand(rows, width, generator=rng, dtype=torch.float64) + 0.2
    return {
        "logp": (old + scale * noise[0]).clamp(max=-0.01),
        "old_logp": old,
        "advantages": noise[1],
        "mask": mask,
        "weights": weights,
    }


def by_rows(per_row, b: dict) -> torch.Tensor:
    """Returns the mean over rows of per_row(logp, old, A, weights), each of the row's unmasked tokens."""
    rows = [
        per_row(*(b[k][i][m] for k in ("logp", "old_logp", "advantages", "weights"))) for i, m in enumerate(b["mask"])
    ]
    return torch.stack(rows).mean()


def gmpo_row(logp, old, adv, weights):
    log_ratio = logp - old
    towards = torch.minimum(adv.sign() * log_ratio, adv.sign() * log_ratio.clamp(-0.1, 0.3)) * adv.sign()
    return -adv.mean() * towards.mean().exp() * weights.log().mean().exp()


def sapo_row(logp, old, adv, weights):
    tau = torch.tensor([1.5 if a > 0 else 2.0 for a in adv], dtype=torch.float64)
    return (-adv * 4 / tau / (1 + torch.exp(-tau * ((logp - old).exp() - 1))) * weights).mean()


WRITTEN_OUT = {
    "gmpo": ({"clip_low": 0.1, "clip_high": 0.3}, gmpo_row),
    "sppo": (
        {"eta": 2.5},
        lambda logp, old, adv, w: ((logp.sum() - old.sum()) - 2.5 * adv.mean()) ** 2 * w.log().mean().exp(),
    ),
    "dro": (
        {"beta": 0.7},
        lambda logp, old, adv, w: (w * (0.35 * (logp - old) ** 2 - adv * logp)).sum(),
    ),
    "sapo": ({"tau_pos": 1.5, "tau_neg": 2.0}, sapo_row),
    "reinforce": ({}, lambda logp, old, adv, w: -(w * adv * logp).sum()),
    "cispo": (
        {"clip_low": 1.0, "clip_high": 0.1},
        lambda logp, old, adv, w: (-(logp - old).exp().clamp(max=1.1).detach() * adv * logp * w).sum(),
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_losses_against_the_formula_written_out(name):
    options, per_row = WRITTEN_OUT[name]
    b = batch()
    mode = LOSSES[name].aggregation if name not in ("dro", "reinforce", "cispo") else "seq-mean-token-sum"
    b["logp"].requires_grad_()
    value, expected = compute_loss(name, aggregation=mode, **b, **options), by_rows(per_row, b)
    torch.testing.assert_close(value, expected, **EXACT)
    grads = [torch.autograd.grad(v, b["logp"])[0] for v in (value, expected)]
    torch.testing.assert_close(*grads, **EXACT)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_gspo_has_the_gradient_of_the_sequence_ratio_where_advantages_are_equal(name, scale):
    b = batch(scale=scale)
    b["advantages"] = b["advantages"][:, :1].expand_as(b["mask"]).clone()
    b["weights"] = torch.ones_like(b["weights"])
    b["logp"].requires_grad_()

    def per_row(logp, old, adv, _):
        s = (logp - old).mean().exp()
        return torch.maximum(-adv[0] * s, -adv[0] * s.clamp(0.9, 1.2))

    value, expected = compute_loss(name, **b, clip_low=0.1, clip_high=0.2), by_rows(per_row, b)
    torch.testing.assert_close(value, expected, **EXACT)
    grads = [torch.autograd.grad(v, b["logp"])[0] for v in (value, expected)]
    torch.testing.assert_close(*grads, **EXACT)
    assert (grads[0][b["mask"]] != 0).any()


def test_dppo_keeps_what_comes_back_and_drops_what_leaves():
    p, old = fp64([0.5, 0.5, 0.3, 0.3, 0.9, 0.02]), fp64([0.3, 0.3, 0.5, 0.5, 0.88, 0.001])
    adv = fp64([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask, seq = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64)
    x = LossInputs(p.log().requires_grad_(), old.log(), adv, mask, seq)
    keep = [False, True, True, False, True, True]  # the last has a ratio of 20 and moved by 0.019
    kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
    assert (kl[:4] > 0.05).all() and (kl[4:] < 0.05).all() and kl[5] > 0.01
    for name in ("dppo_tv", "dppo_kl"):
        loss, stats = LOSSES[name].function(x, ratio_cap=5.0)
        expected = torch.where(torch.tensor(keep), -adv * (p / old).clamp(max=5.0) * p.log(), 0.0)
        torch.testing.assert_close(loss, expected, **EXACT)
        assert stats["clip_fraction"].tolist() == [float(not k) for k in keep]
        assert stats["cap_fraction"].tolist() == [0, 0, 0, 0, 0, 1]
    _, stats = LOSSES["dppo_kl"].function(x, clip_high=0.01)
    assert stats["clip_fraction"].tolist() == [1, 0, 0, 1, 0, 1]


def test_covariance_losses_at_the_selected_tokens():
    b = batch(scale=1.0)
    selected = torch.zeros_like(b["mask"])
    selected[:, ::2] = True
    b |= {"selected": selected, "weights": torch.ones_like(b["weights"])}
    held, m = selected & b["mask"], b["mask"]
    ratio = (b["logp"] - b["old_logp"]).exp()
    surrogate = -b["advantages"] * ratio
    with_kl = surrogate + 0.5 * held * ratio.log().abs()
    clipped = torch.maximum(surrogate, -b["advantages"] * ratio.clamp(0.9, 1.2)) * ~held
    torch.testing.assert_close(compute_loss("kl_cov", **b, kl_coef=0.5), (with_kl * m).sum() / m.sum(), **EXACT)
    value = compute_loss("clip_cov", **b, clip_low=0.1, clip_high=0.2)
    torch.testing.assert_close(value, (clipped * m).sum() / m.sum(), **EXACT)


SMOOTH = sorted(LOSSES.keys() - {"gspo", "gspo_token", "cispo", "dppo_tv", "dppo_kl"})
"""Losses without a stop-gradient: their gradient is the derivative of their value."""


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradients_are_derivatives(name, mode):
    b = batch(seed=3)
    extra = {"selected": b["weights"] > 0.7} if LOSSES[name].select else {}
    logp = b.pop("logp").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logp: compute_loss(name, logp=logp, aggregation=mode, horizon=20, **b, **extra), (logp,)
    )


def inputs(logp, old, adv, mask=None) -> LossInputs:
    logp, old, adv = fp64(logp), fp64(old), fp64(adv)
    mask = torch.ones(len(logp), dtype=torch.bool) if mask is None else torch.tensor(mask)
    selected = torch.ones(len(logp), dtype=torch.bool)
    seq = torch.zeros(len(logp), dtype=torch.int64)
    return LossInputs(logp.requires_grad_(), old, adv, mask, seq, selected=selected)


def test_ppo_by_hand():
    logs = [math.log(r) for r in (1.0, 1.5, 1.5, 0.5, 0.5, 5.0, 5.0)]
    adv = [2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 2.0]
    x = inputs(logs, [0.0] * 7, adv)
    loss, stats = LOSSES["ppo"].function(x, **WIDE, dual_clip=3.0)
    torch.testing.assert_close(loss, fp64([-2.0, -2.56, 3.0, -1.0, 1.6, 6.0, -2.56]))
    assert stats["clip_fraction"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert stats["dual_clip_fraction"].tolist() == [0, 0, 0, 0, 0, 1, 0]
    torch.testing.assert_close(stats["ratio"], fp64([1.0, 1.5, 1.5, 0.5, 0.5, 5.0, 5.0]))
    torch.testing.assert_close(stats["old_kl"], -fp64(logs))
    (grad,) = torch.autograd.grad(loss.sum(), x.logp)
    torch.testing.assert_close(grad, fp64([-2.0, 0, 3.0, -1.0, 0, 0, 0]))  # -A r where nothing clips
    unbounded, _ = LOSSES["ppo"].function(x, **WIDE)
    assert unbounded[5].item() == pytest.approx(10.0)


# ── every loss ───────────────────────────────────────────────────────────────


@every_loss
def test_rows_say_what_is_true(name):
    row, b = LOSSES[name], batch()
    assert row.aggregation in AGGREGATIONS and paper_of(row.function).startswith("https://")
    assert row.scope != "one per sequence" or row.aggregation == "seq-mean-token-mean"
    mask = b["mask"].flatten()
    logp = b["logp"].detach().flatten().clone().requires_grad_()
    seq = torch.arange(len(b["mask"])).repeat_interleave(b["mask"].shape[1])
    x = LossInputs(logp, logp.detach(), b["advantages"].flatten(), mask, seq)
    if row.select:
        x = replace(x, selected=mask & (torch.arange(len(mask)) % 3 == 0))
    # The loss of a token depends on the logp of others of its sequence, or on its own alone.
    at = int(mask.nonzero()[0])
    others = 1e-5 * (torch.arange(len(mask)) != at)  # within every clip
    value, changed = (row.function(replace(x, logp=logp + d))[0][at] for d in (0.0, others))
    assert bool(value != changed) == (row.scope != "token"), name
    loss_T, _ = row.function(replace(x, advantages=torch.zeros_like(x.advantages)))
    (gradient,) = torch.autograd.grad(loss_T.sum(), logp)
    assert not row.skips or not (loss_T.any() or gradient.any()), name


def test_inputs_begin_with_those_of_every_loss():
    assert [f.name for f in fields(LossInputs)][:5] == ["logp", "old_logp", "advantages", "mask", "seq"]


@every_loss
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_masked_positions_give_exactly_zero(name, rubbish):
    # The log ratios are within every clip, so that every loss has a gradient.
    x = inputs([-1.0, rubbish, -0.5], [-1.0001, rubbish, -0.50009], [1.0, rubbish, -1.0], [True, False, True])
    x = LossInputs(**vars(x) | {"weights": fp64([0.5, rubbish, 2.0]), "selected": torch.tensor([True, True, False])})
    loss, stats = LOSSES[name].function(x)
    (grad,) = torch.autograd.grad(loss.sum(), x.logp)
    assert loss[1] == 0 and grad[1] == 0 and loss.isfinite().all() and grad.isfinite().all()
    assert all(s[1] == 0 and s.isfinite().all() for s in stats.values())
    alive = [2] if name == "clip_cov" else [0, 2]
    if name != "gmpo":  # whose advantage is the mean, 0 here
        assert (grad[alive] != 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_out_of_range_stay_finite(name, dtype, sign):
    logs, old = torch.tensor([[0.0, -1e3, -1e3, 0.0, -0.1], [-1e3, 0.0, 0.0, -1e3, -0.3]], dtype=dtype)
    seq, mask = torch.tensor([0, 1, 2, 2, 2]), torch.ones(5, dtype=torch.bool)
    for advantages in (torch.full((5,), sign), torch.tensor([1.0, -1, 1, -1, 1]) * sign):
        logp = logs.clone().requires_grad_()
        x = LossInputs(logp, old, advantages.to(dtype), mask, seq, selected=mask)
        loss, stats = LOSSES[name].function(x)
        (grad,) = torch.autograd.grad(loss.sum(), logp)
        assert loss.dtype == dtype and loss.isfinite().all() and grad.isfinite().all(), (loss, grad)
        assert all(s.isfinite().all() for s in stats.values())


def test_a_clamped_ratio_has_no_gradient():
    x = inputs([0.0, -2000.0], [-2000.0, 0.0], [-1.0, -1.0])
    loss, _ = LOSSES["ppo"].function(x)
    torch.testing.assert_close(loss, fp64([math.exp(20), 0.8]))
    assert torch.autograd.grad(loss.sum(), x.logp)[0].tolist() == [0, 0]
    x = inputs([0.0, 0.0], [-2000.0, 0.0], [-1.0, -1.0])
    for name in ("gspo", "gmpo"):
        loss, _ = LOSSES[name].function(x)
        torch.testing.assert_close(loss, torch.full((2,), math.exp(20), dtype=torch.float64))
        assert torch.autograd.grad(loss.sum(), x.logp)[0].tolist() == [0, 0]


def part_loss(b: dict, sequences: torch.Tensor, totals: Totals, name: str, mode: str):
    """Computes loss and gradient per token of `sequences`, packed in that order as one micro-batch."""
    index = torch.cat([torch.nonzero(b["seq"] == s).flatten() for s in sequences])
    lengths = torch.stack([(b["seq"] == s).sum() for s in sequences])
    part = {name: tensor[index] for name, tensor in b.items()}
    part["seq"] = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    logp = part["logp"] = part["logp"].clone().requires_grad_()
    x = LossInputs(**part)
    loss_T, stats = LOSSES[name].function(x)
    assert loss_T.shape == logp.shape and (loss_T[~x.mask] == 0).all()
    assert all(s.shape == logp.shape and not s.requires_grad and (s[~x.mask] == 0).all() for s in stats.values())
    value = (loss_T * token_weights(mode, x.mask, x.seq, totals, horizon=12)).sum()
    (grad,) = torch.autograd.grad(value, logp)
    return value.detach(), torch.zeros(len(b["seq"]), dtype=torch.float64).index_copy(0, index, grad)


@every_loss
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(1, 4),
    mode=st.sampled_from(AGGREGATIONS),
    weights=st.sampled_from(["none", "random", "some are 0"]),
)
def test_layout_microbatches_and_order_do_not_change_loss_or_gradient(name, seed, lengths, parts, mode, weights):
    rng = torch.Generator().manual_seed(seed)
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(len(seq), generator=rng) < 0.7  # some sequences end up without a single unmasked token
    b = {n: torch.randn(len(seq), generator=rng, dtype=torch.float64) for n in ("logp", "old_logp", "advantages")}
    if weights != "none":
        b["weights"] = torch.rand(len(seq), generator=rng, dtype=torch.float64)
        b["weights"] = b["weights"] * (b["weights"] > 0.2) if weights == "some are 0" else b["weights"]
    for column in b:  # Values at masked positions must not matter.
        b[column] = torch.where(mask, b[column], torch.tensor((math.nan, -math.inf))[seed % 2])
    b |= {"mask": mask, "seq": seq}
    if LOSSES[name].select:
        b["selected"] = select(name, LossInputs(**b))
    per_seq = torch.zeros(len(lengths)).index_add(0, seq, mask.float())
    totals = Totals(tokens=float(mask.sum()), sequences=float((per_seq > 0).sum()))
    assert count_totals(mask, seq) == totals

    value, grad = part_loss(b, torch.arange(len(lengths)), totals, name, mode)
    pieces = [p for p in torch.randperm(len(lengths), generator=rng).chunk(parts) if len(p)]
    values, grads = zip(*(part_loss(b, p, totals, name, mode) for p in pieces), strict=True)
    torch.testing.assert_close(sum(values), value, **EXACT)
    torch.testing.assert_close(sum(grads), grad, **EXACT)
    assert value.isfinite() and grad.isfinite().all() and (grad[~mask] == 0).all()


@every_loss
def test_weights_multiply(name):
    b = batch(seed=1)
    extra = {"selected": b["mask"]} if LOSSES[name].select else {}
    plain = compute_loss(name, **b | {"weights": None}, **extra)
    ones, threes = (compute_loss(name, **b | {"weights": torch.full_like(b["logp"], w)}, **extra) for w in (1.0, 3.0))
    torch.testing.assert_close(ones, plain, **EXACT)
    torch.testing.assert_close(threes, 3 * plain, **EXACT)
    only_first = torch.zeros_like(b["logp"])
    only_first[0] = 1
    mode = {"aggregation": "seq-mean-token-mean"}
    first = compute_loss(name, **{k: v[:1] for k, v in (b | extra).items()} | {"weights": None} | mode)
    alone = compute_loss(name, **b | {"weights": only_first}, **extra, **mode)
    torch.testing.assert_close(alone, first / len(b["mask"]), **EXACT)


@pytest.mark.parametrize("name, options, match", [
    ("ppo", {"dual_clip": 0.5}, "dual_clip"),
    ("ppo", {"clip_low": -0.1}, "clip_low"),
    ("ppo", {"clip_low": 1.5}, "clip_low"),
    ("gspo", {"clip_low": 2.0}, "clip_low"),
    ("gmpo", {"clip_high": -1.0}, "clip_high"),
    ("cispo", {"clip_high": math.nan}, "clip_high"),
    ("sapo", {"tau_neg": 0.0}, "tau"),
    ("dppo_tv", {"clip_low": 1.2}, "clip_low"),
    ("dppo_kl", {"ratio_cap": 0.0}, "ratio_cap"),
    ("dro", {"beta": 0.0}, "beta"),
    ("sppo", {"eta": -1.0}, "eta"),
    ("kl_cov", {"kl_coef": -1.0}, "kl_coef"),
    ("clip_cov", {"cov_ratio": 2.0}, "cov_ratio"),
])  # fmt: skip
def test_losses_refuse_settings_out_of_range(name, options, match):
    with pytest.raises(ValueError, match=match):
        LOSSES[name].function(inputs([-1.0], [-1.0], [1.0]), **options)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.select])
def test_selecting_losses_ask_for_their_selection(name):
    x = inputs([-1.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match="select_"):
        LOSSES[name].function(LossInputs(x.logp, x.old_logp, x.advantages, x.mask, x.seq))


# ── compute_loss, kl_estimate ────────────────────────────────────────────────


@every_loss
def test_compute_loss_takes_masks_and_dtypes_alike(name):
    b = batch(seed=2)
    mask = b.pop("mask")
    value = compute_loss(name, mask=mask, **b)
    assert value.shape == () and value.dtype == torch.float64
    for other in (mask.int(), mask.double(), mask.tolist()):
        assert compute_loss(name, mask=other, **b) == value
    rest = {k: v.tolist() for k, v in b.items() if k != "logp"}
    assert compute_loss(name, mask=mask, logp=b["logp"], **rest) == value
    half = compute_loss(name, mask=mask, **{k: v.float() for k, v in b.items()})
    assert half.dtype == torch.float32 and half.item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    # Rows without an unmasked token count nowhere, whatever they hold.
    longer = {k: torch.cat([v, torch.full_like(v[:2], math.nan)]) for k, v in b.items()}
    longer_mask = torch.cat([mask, torch.zeros_like(mask[:2])])
    draw = torch.rand(longer_mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    draws = [{"draw": draw[: len(mask)]}, {"draw": draw}] if name == "clip_cov" else [{}, {}]
    with_rows = compute_loss(name, mask=longer_mask, **longer, **draws[1])
    torch.testing.assert_close(with_rows, compute_loss(name, mask=mask, **b, **draws[0]), **EXACT)
    assert compute_loss(name, mask=mask & False, **b) == 0


@every_loss
def test_compute_loss_does_not_see_the_order_of_samples(name):
    b, order = batch(seed=4), torch.tensor([3, 0, 4, 2, 1])
    draw = {"draw": b["weights"] / 2} if name == "clip_cov" else {}
    options = {"cov_ratio": 0.1} if LOSSES[name].select else {}
    options |= {"cov_low": 0.0} if name == "clip_cov" else {}
    b |= draw
    shuffled = {k: v[order] for k, v in b.items()}
    torch.testing.assert_close(compute_loss(name, **shuffled, **options), compute_loss(name, **b, **options), **EXACT)


def test_compute_loss_aggregations():
    b = batch(seed=5)
    m, n = b["mask"], b["mask"].sum(1)
    token = -b["advantages"] * b["logp"] * b.pop("weights").fill_(1.0) * m
    expected = {
        "token-mean": token.sum() / m.sum(),
        "seq-mean-token-sum": token.sum(1).mean(),
        "seq-mean-token-mean": (token.sum(1) / n).mean(),
        "seq-mean-token-sum-norm": token.sum(1).mean() / m.shape[1],
    }
    for mode in AGGREGATIONS:
        torch.testing.assert_close(compute_loss("reinforce", **b, aggregation=mode), expected[mode], **EXACT)
    other = compute_loss("reinforce", **b, aggregation="seq-mean-token-sum-norm", horizon=14)
    torch.testing.assert_close(other * 2, expected["seq-mean-token-sum-norm"], **EXACT)
    assert compute_loss("reinforce", **b) == compute_loss("reinforce", **b, aggregation="seq-mean-token-sum")
    assert compute_loss("ppo", **b) == compute_loss("ppo", **b, aggregation="token-mean")
    for name in (name for name, row in LOSSES.items() if row.scope == "one per sequence"):
        assert compute_loss(name, **b, aggregation="token-mean") == compute_loss(name, **b)


def test_compute_loss_says_what_is_wrong():
    b = batch()
    for options, match in (
        ({"name": "pppo"}, r"did you mean 'ppo'.*reinforce"),
        ({"clip_hi": 0.2}, r"clip_hi.*did you mean 'clip_high'.*clip_low, clip_high, dual_clip"),
        ({"name": "gpg", "clip_low": 0.2}, "its settings: none; tensors: "),
        ({"aggregation": "token_mean"}, r"token_mean.*did you mean 'token-mean'"),
        ({"name": "gmpo", "aggregation": "mean"}, "aggregation"),
        ({"advantages": b["advantages"][:, :2]}, r"advantages must be \(5, 7\)"),
        ({"logp": b["logp"][:2]}, r"logp must be \(5, 7\)"),
        ({"logp": b["logp"].tolist()}, "logp must be a tensor"),
        ({"mask": b["logp"]}, "mask must hold 0 and 1"),
    ):
        with pytest.raises(ValueError, match=match):
            compute_loss(**{"name": "ppo"} | b | options)
    with pytest.raises(ValueError, match="did you mean 'k3'.*abs"):
        kl_estimate("kk3", b["logp"], b["old_logp"])
    with pytest.raises(ValueError, match="ref_logp must be"):
        kl_estimate("k3", b["logp"], b["old_logp"][:1])


# ── aggregation ──────────────────────────────────────────────────────────────


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


# ── KL ───────────────────────────────────────────────────────────────────────


def test_kl_clamps_and_mask():
    logp = fp64([-50.0, -3.0, -1.0, math.nan]).requires_grad_()
    ref = fp64([-1.0, -1.0, -1.0, -math.inf])
    mask = torch.tensor([True, True, True, False])
    for kind in KL_KINDS:
        kl = kl_estimate(kind, logp, ref, mask)
        (grad,) = torch.autograd.grad(kl.sum(), logp)
        assert kl[3] == 0 and grad[3] == 0 and kl.isfinite().all() and grad.isfinite().all(), kind
    expected = fp64([10.0, math.exp(2) - 3, 0.0])  # exp(49) - 50 is clamped to 10
    torch.testing.assert_close(kl_estimate("k3", logp, ref, mask)[:3].detach(), expected)
    with pytest.raises(ValueError, match="k3"):
        kl_estimate("k4", logp, ref)


def test_kl_keeps_the_precision_of_a_reference():
    logp, ref = torch.tensor([-1.2345678]), fp64([-1.23456789012])
    assert torch.equal(kl_estimate("k1", logp, ref), logp - ref)
    assert kl_estimate("k1", logp, ref.tolist()).dtype == torch.float32


def test_adaptive_coef():
    for kl, expected in ((6.0, 1 + 0.2 * 0.1), (6.6, 1 + 0.1 * 0.1), (5.4, 1 - 0.1 * 0.1), (0.0, 1 - 0.2 * 0.1)):
        target = 6.0 if kl != 6.0 else 3.0
        assert adaptive_coef(0.5, kl, target, horizon=2560, samples=256) == pytest.approx(0.5 * expected, rel=1e-12)
    assert adaptive_coef(0.5, 6.0, 6.0, 100, 10) == 0.5
    for wrong in ((-1, 1, 1, 1, 1), (1, 1, 0, 1, 1), (1, 1, 1, 0, 1), (1, math.nan, 1, 1, 1), (1, 1, 1, 1, 6)):
        with pytest.raises(ValueError):
            adaptive_coef(*wrong)


# ── beside the policy ────────────────────────────────────────────────────────


def test_value_loss_by_hand_and_masked():
    values = fp64([1.0, 1.0, 0.0, math.nan]).requires_grad_()
    old, returns = fp64([0.5, 0.5, 0.0, math.nan]), fp64([2.0, 0.8, 1.0, -math.inf])
    mask = torch.tensor([True, True, True, False])
    loss, stats = value_loss(values, old, returns, mask, clip=0.2)
    torch.testing.assert_close(loss, 0.5 * fp64([1.3**2, 0.2**2, 1.0, 0.0]))
    assert stats["value_clip_fraction"].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(stats["value_error"], fp64([-1.0, 0.2, -1.0, 0.0]))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), values)[0], fp64([0.0, 0.2, -1.0, 0.0]))
    plain, stats = value_loss(values, old, returns, mask)
    torch.testing.assert_close(plain, 0.5 * fp64([1.0, 0.2**2, 1.0, 0.0]))
    assert "value_clip_fraction" not in stats
    with pytest.raises(ValueError, match="clip"):
        value_loss(values, old, returns, mask, clip=0.0)


def test_implicit_rewards_and_their_loss():
    logp = fp64([-1.0, -2.0, math.nan, -0.5, -3.0, math.inf]).requires_grad_()
    ref = fp64([-1.5, -2.5, math.nan, -1.5, -1.0, -math.inf])
    mask, seq = torch.tensor([True, True, False, True, True, False]), torch.tensor([0, 0, 0, 1, 1, 2])
    rewards = implicit_rewards(logp, ref, mask, beta=0.1)
    torch.testing.assert_close(rewards, fp64([0.05, 0.05, 0.0, 0.1, -0.2, 0.0]))
    outcome_B = fp64([1.0, 0.25, 0.0])
    loss = implicit_reward_loss(logp, ref, mask, seq, outcome_B, beta=0.1)
    p0, p1 = 1 / (1 + math.exp(-0.1)), 1 / (1 + math.exp(0.1))
    ce1 = -(0.25 * math.log(p1) + 0.75 * math.log(1 - p1))
    torch.testing.assert_close(loss, fp64([-math.log(p0), -math.log(p0), 0.0, ce1, ce1, 0.0]))
    assert torch.equal(implicit_reward_loss(logp, ref, mask, seq, outcome_B[seq], beta=0.1), loss)
    mean = (loss * token_weights("seq-mean-token-mean", mask, seq, count_totals(mask, seq))).sum()
    grad = torch.autograd.grad(mean, logp)[0]  # beta (p - outcome) / sequences, at each token
    expected = 0.1 * 0.5 * fp64([p0 - 1, p0 - 1, 0, p1 - 0.25, p1 - 0.25, 0])
    torch.testing.assert_close(grad, expected)
    far = implicit_reward_loss(fp64([-1e3]), fp64([0.0]), mask[:1], seq[:1], fp64([1.0]), beta=1.0)
    assert far.item() == pytest.approx(1e3)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        implicit_reward_loss(logp, ref, mask, seq, outcome_B - 1)
    with pytest.raises(ValueError, match="beta"):
        implicit_rewards(logp, ref, mask, beta=0.0)


def test_positive_nll():
    logp = fp64([-1.0, -2.0, -3.0, math.nan]).requires_grad_()
    loss = positive_nll(logp, torch.tensor([True, True, True, False]), torch.tensor([True, True, False, True]))
    assert loss.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [-1.0, -1.0, 0.0, 0.0]


def test_dual_step_climbs_the_lagrangian_in_log_space():
    # The derivative of multiplier * (cost - limit) with respect to log multiplier.
    log = fp64(math.log(0.5)).requires_grad_()
    (slope,) = torch.autograd.grad(log.exp() * (3.0 - 1.0), log)
    expected = math.exp(math.log(0.5) + 0.1 * slope.item())
    assert dual_step(0.5, 3.0, 1.0, 0.1, 10.0) == pytest.approx(expected, rel=1e-12)
    assert dual_step(0.5, 0.0, 1.0, 0.1, 10.0) == pytest.approx(0.5 * math.exp(-0.05), rel=1e-12)
    assert dual_step(0.5, 1.0, 1.0, 0.1, 10.0) == pytest.approx(0.5)
    assert dual_step(5.0, 1e9, 0.0, 1.0, 10.0) == 10.0
    assert dual_step(5.0, -1e9, 0.0, 1.0, 10.0) > 0
    for wrong in ((0.0, 1, 1, 1, 1), (1, math.nan, 1, 1, 1), (1, 1, 1, 0, 1), (1, 1, 1, 1, 0)):
        with pytest.raises(ValueError):
            dual_step(*wrong)


def test_own_losses_count_by_token_where_they_say_so_or_hand_on_a_built_in_one_that_does():
    def own(x):
        return x.logp, {}

    assert own_loss(own).scope == "sequence"
    own.token_separable = True
    assert own_loss(own).scope == own_loss(LOSSES["ppo"].function).scope == "token"
    assert own_loss(LOSSES["gspo"].function).scope == "sequence"


@pytest.mark.parametrize("name", LOSSES)
def test_each_parameter_of_a_loss_has_a_setting(name):
    function = LOSSES[name].function
    named = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert named <= set(parameters_of(function)), "a field of AlgoConfig in config/learning.py is missing"
