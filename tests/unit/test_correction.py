"""Rollout correction: weights, rejection and monitors against verl 0.9.1's numbers and formulas written out."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos.correction import (
    CORRECTIONS,
    correction_weights,
    disagreement,
    finish_monitors,
    mismatch,
    reject_sequences,
)
from spmdrl.algos.rows import settings_of
from spmdrl.tracking.metrics import Metrics

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "verl_0.9.1.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
ENTRIES = {
    "tis_token_2": ("tis_token", {}),
    "tis_seq_2": ("tis_sequence", {}),
    "icepop_0.5_2": ("icepop", {"low": 0.5, "high": 2.0}),
}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
KINDS = pytest.mark.parametrize("kind", CORRECTIONS)


def fp64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
def test_parity_verl_rollout_correction(case):
    inputs = case["inputs"]
    assert set(case["rollout_correction"]) == set(ENTRIES), "a golden correction without a test"
    for entry, expected in case["rollout_correction"].items():
        kind, bounds = ENTRIES[entry]
        weights = correction_weights(
            kind, old_logp=inputs["old"], rollout_logp=inputs["rollout"], mask=inputs["mask"], **bounds
        )
        torch.testing.assert_close(weights, fp64(expected), rtol=0, atol=1e-8, msg=entry)


def packed(seed: int, lengths: list[int], scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Packs old_logp, rollout_logp, mask and seq, with rubbish outside the mask."""
    rng = torch.Generator().manual_seed(seed)
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(len(seq), generator=rng) < 0.7
    old, rollout = (scale * torch.randn(len(seq), generator=rng, dtype=torch.float64) for _ in range(2))
    return torch.where(mask, old, math.nan), torch.where(mask, rollout, -math.inf), mask, seq


def test_weights_by_hand():
    ratio = fp64([0.4, 1.0, 3.0, 1.5, 2.0, 9.0])
    mask, seq = torch.tensor([True] * 5 + [False]), torch.tensor([0, 0, 0, 1, 1, 1])  # products 1.2 and 3
    args = (ratio.log(), torch.zeros(6, dtype=torch.float64), mask, seq)
    expected = {
        ("none", None, None): [1, 1, 1, 1, 1, 0],
        ("tis_token", None, None): [0.4, 1, 2, 1.5, 2, 0],
        ("tis_token", None, 1.2): [0.4, 1, 1.2, 1.2, 1.2, 0],
        ("tis_sequence", None, None): [1.2, 1.2, 1.2, 2, 2, 0],
        ("icepop", None, None): [0, 1, 3, 1.5, 2, 0],
        ("icepop", 0.0, 1.9): [0.4, 1, 0, 1.5, 0, 0],
        ("mis_token", None, None): [0.4, 1, 0, 1.5, 2, 0],
        ("mis_token", 0.5, 3.5): [0, 1, 3, 1.5, 2, 0],
        ("mis_sequence", None, None): [1.2, 1.2, 1.2, 0, 0, 0],
        ("mis_sequence", 1.5, 4.0): [0, 0, 0, 3, 3, 0],
    }
    assert {kind for kind, _, _ in expected} == set(CORRECTIONS)
    for (kind, low, high), weights in expected.items():
        torch.testing.assert_close(correction_weights(kind, *args, low, high), fp64(weights), **EXACT, msg=kind)


@KINDS
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    scale=st.sampled_from([0.1, 1.0, 1e3]),
)
def test_weights_are_finite_and_do_not_see_other_sequences(kind, seed, lengths, scale):
    old, rollout, mask, seq = packed(seed, lengths, scale)
    old.requires_grad_()
    weights = correction_weights(kind, old, rollout, mask, seq)
    assert not weights.requires_grad and weights.isfinite().all() and (weights >= 0).all()
    assert (weights[~mask] == 0).all()
    high = settings_of(CORRECTIONS[kind].function).get("high")
    assert high is None or (weights <= high).all()
    for s in range(len(lengths)):
        at = seq == s
        alone = correction_weights(kind, old[at], rollout[at], mask[at], seq[at] - s)
        torch.testing.assert_close(alone, weights[at], **EXACT)


def test_weights_say_what_is_wrong():
    args = packed(0, [3])
    for kind, low, high, match in (
        ("tis", None, None, "tis_token"),
        ("tis_token", 0.5, None, "mis_token"),
        ("tis_sequence", 0.5, None, "mis_sequence"),
        ("icepop", 3.0, 2.0, "low"),
        ("mis_token", None, 0.0, "high > 0, got"),
        ("mis_token", -1.0, None, "high > 0, got"),
    ):
        with pytest.raises(ValueError, match=match):
            correction_weights(kind, *args, low, high)
    with pytest.raises(ValueError, match="did you mean 'icepop'"):
        correction_weights("icepops", old_logp=[[0.0]], rollout_logp=[[0.0]], mask=[[1]])
    with pytest.raises(ValueError, match="rollout_logp must be"):
        correction_weights("icepop", old_logp=[[0.0]], rollout_logp=[[0.0, 1.0]], mask=[[1]])


def test_correction_weights_take_masks_and_dtypes_alike():
    old, rollout = torch.randn(3, 4), torch.randn(3, 4).double()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    for kind in CORRECTIONS:
        weights = correction_weights(kind, old_logp=old, rollout_logp=rollout, mask=mask)
        assert weights.shape == old.shape and weights.dtype == torch.float32 and (weights[mask == 0] == 0).all()
        for other in (mask.bool(), mask.float()):
            assert torch.equal(correction_weights(kind, old_logp=old, rollout_logp=rollout, mask=other), weights)


def test_sequences_are_rejected_by_their_geometric_mean():
    ratio = fp64([0.5, 2.0, 1.1, 1.1, math.nan, 0.8, 7.0])
    mask, seq = torch.tensor([True, True, True, True, False, True, False]), torch.tensor([0, 0, 1, 1, 1, 2, 3])
    args = (ratio.log(), torch.zeros(7, dtype=torch.float64), mask, seq)  # means 1, 1.1, 0.8, 1 (of nothing)
    assert reject_sequences(*args, 0.9, 1.05).tolist() == [True, False, False, True]
    assert reject_sequences(*args, 0.9, None).tolist() == [True, True, False, True]
    assert reject_sequences(*args, None, 1.05).tolist() == [True, False, True, True]
    assert reject_sequences(*args, 0.9, 1.05, sequences=6).tolist() == [True, False, False, True, True, True]
    with pytest.raises(ValueError, match="low"):
        reject_sequences(*args, 2.0, 1.0)


def monitors(parts: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    metrics = Metrics()
    for part in parts:
        for name, (value, weight) in mismatch(*part).items():
            metrics.add(name, value, weight)
        value, weight, largest = disagreement(*part[:3])
        metrics.add("logp_diff/mean", value, weight)
        metrics.add_max("logp_diff/max", largest)
    return finish_monitors(metrics.reduce(lambda tensor, op: None))


def test_monitors_against_the_formula_written_out():
    old, rollout, mask, seq = packed(5, [4, 7, 1, 5], scale=0.4)
    d = (old - rollout)[mask]
    r = d.exp()
    of_sequences = [(old - rollout)[mask & (seq == s)].sum() for s in range(4) if (mask & (seq == s)).any()]
    q = torch.stack(of_sequences).exp()
    expected = {
        "logp_diff/mean": d.abs().mean(),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": (r - 1 - d).mean(),
        "mismatch/chi2": (r**2).mean() - 1,
        "mismatch/ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "mismatch/sequence_chi2": (q**2).mean() - 1,
        "mismatch/sequence_ess": q.sum() ** 2 / (len(q) * (q**2).sum()),
        "logp_diff/max": d.abs().max(),
    }
    values = monitors([(old, rollout, mask, seq)])
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name] == pytest.approx(value.item(), rel=1e-12), name


def test_monitors_estimate_what_they_are_named_for():
    # Tokens sampled from q, their log-probabilities under p: KL(q || p) and chi-square(p || q) in closed form.
    rng = torch.Generator().manual_seed(0)
    q, p = fp64([0.5, 0.3, 0.2]), fp64([0.4, 0.25, 0.35])
    token = torch.multinomial(q, 200_000, replacement=True, generator=rng)
    seq = torch.arange(len(token)) // 2
    values = monitors([(p.log()[token], q.log()[token], torch.ones(len(token), dtype=torch.bool), seq)])
    kl, chi2 = (q * (q / p).log()).sum().item(), (p**2 / q).sum().item() - 1
    assert values["mismatch/k1"] == pytest.approx(kl, abs=5e-3)
    assert values["mismatch/k3"] == pytest.approx(kl, abs=2e-3)
    assert values["mismatch/chi2"] == pytest.approx(chi2, abs=0.01)
    assert values["mismatch/sequence_chi2"] == pytest.approx((1 + chi2) ** 2 - 1, abs=0.03)
    assert values["mismatch/ess"] == pytest.approx(1 / (1 + chi2), abs=0.01)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(1, 4),
)
def test_layout_monitors_add_up_over_microbatches(seed, lengths, parts):
    old, rollout, mask, seq = packed(seed, lengths)
    pieces = []
    for chunk in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).chunk(parts):
        at = torch.cat([torch.nonzero(seq == s).flatten() for s in chunk])
        new_seq = torch.cat([torch.full((int((seq == s).sum()),), i) for i, s in enumerate(chunk)])
        pieces.append((old[at], rollout[at], mask[at], new_seq))
    one, many = monitors([(old, rollout, mask, seq)]), monitors(pieces)
    assert one.keys() == many.keys()
    for name in one:
        assert many[name] == pytest.approx(one[name], rel=1e-12, abs=1e-12), name
        assert math.isfinite(one[name])


def test_monitors_of_nothing_and_of_extremes():
    none = fp64([math.nan, 3.0]), fp64([0.0, 1.0]), torch.tensor([False, False]), torch.tensor([0, 1])
    assert monitors([none]) == {}
    empty = tuple(x[:0] for x in none)
    assert monitors([empty]) == {}
    far = fp64([0.0, -1e3]), fp64([-1e3, 0.0]), torch.tensor([True, True]), torch.tensor([0, 1])
    assert all(math.isfinite(v) for v in monitors([far]).values())
    assert finish_monitors({"loss": 1.0}) == {"loss": 1.0}
