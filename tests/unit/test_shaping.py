"""Reward shaping against plain loops."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos.shaping import (
    RunningMoments,
    clip_reward,
    length_penalty_group,
    length_penalty_linear,
    normalize_reward,
    overlong_mask,
    overlong_punishment,
    place_outcome,
    reward_moments,
    token_rewards,
)

REWARDS = st.lists(st.floats(-100, 100), max_size=20)
GROUPED = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([2, 11, -1])), max_size=20)


def fp64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ── length ───────────────────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 130), max_size=20), st.integers(1, 100), st.floats(0, 3))
def test_overlong_punishment_is_equation_13(lengths, buffer, factor):
    longest = 100

    def equation(length):
        if length <= longest - buffer:
            return 0.0
        return factor * ((longest - buffer) - length) / buffer if length <= longest else -factor

    got = overlong_punishment(torch.tensor(lengths, dtype=torch.int64), longest, buffer, factor)
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx([equation(n) for n in lengths], abs=1e-12)


def test_length_terms_by_hand():
    length_B = torch.tensor([10, 80, 90, 100, 120])
    assert overlong_punishment(length_B, 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length_penalty_linear(length_B, 100, 0.5).tolist() == pytest.approx([-0.05, -0.4, -0.45, -0.5, -0.6])
    # Kimi k1.5: lengths 10, 20, 30 of one prompt, right and wrong.
    length_B = torch.tensor([10, 20, 30, 10, 20, 30])
    group_B = torch.tensor([0, 0, 0, 1, 1, 1])
    correct_B = torch.tensor([True] * 3 + [False] * 3)
    assert length_penalty_group(length_B, correct_B, group_B).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5]
    assert length_penalty_group(length_B, correct_B, group_B, 0.2)[0] == 0.1


@settings(max_examples=100, deadline=None)
@given(GROUPED, st.randoms(use_true_random=False))
def test_group_length_penalty_matches_a_loop(samples, rng):
    length_B = torch.tensor([s[0] for s in samples], dtype=torch.int64)
    correct_B = torch.tensor([s[1] for s in samples], dtype=torch.bool)
    group_B = torch.tensor([s[2] for s in samples], dtype=torch.int64)
    expected = []
    for length, correct, group in samples:
        lengths = [n for n, _, g in samples if g == group]
        if min(lengths) == max(lengths):
            expected.append(0.0)
            continue
        lam = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
        expected.append(lam if correct else min(0.0, lam))
    got = length_penalty_group(length_B, correct_B, group_B)
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, abs=1e-14)
    assert bool((got.abs() <= 0.5).all()) and bool((got[~correct_B] <= 0).all())
    order = list(range(len(samples)))
    rng.shuffle(order)
    assert torch.equal(length_penalty_group(length_B[order], correct_B[order], group_B[order]), got[order])


def test_length_settings_are_checked():
    length_B = torch.tensor([1, 2])
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match=r"buffer must be in 1 \.\. 100"):
            overlong_punishment(length_B, 100, buffer)
    with pytest.raises(ValueError, match="factor"):
        overlong_punishment(length_B, 100, 10, -1.0)
    with pytest.raises(ValueError, match="> 0 tokens"):
        length_penalty_linear(length_B, 0, 1.0)
    with pytest.raises(ValueError, match="correct must be bool"):
        length_penalty_group(length_B, torch.ones(2), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        length_penalty_group(length_B, torch.ones(2).bool(), torch.zeros(3).long())


# ── scale ────────────────────────────────────────────────────────────────────


def test_clip_reward():
    reward_B = torch.tensor([-3.0, -0.5, 0.0, 0.5, 9.0])
    assert clip_reward(reward_B, -1, 1).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert clip_reward(reward_B, -math.inf, 1).tolist() == [-3.0, -0.5, 0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="low <= high"):
        clip_reward(reward_B, 1, -1)


@settings(max_examples=100, deadline=None)
@given(st.lists(REWARDS, max_size=6))
def test_running_moments_are_those_of_everything_seen(steps):
    moments, seen = RunningMoments(), []
    for rewards in steps:
        # Two ranks hold a part each; the moments only see the sums.
        local = reward_moments(fp64(rewards[::2])) + reward_moments(fp64(rewards[1::2]))
        assert moments.update(*local.tolist()) is moments
        seen += rewards
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(statistics.fmean(seen), abs=1e-11)
        # The variance, as the root of a rounding error near 0 is not small.
        assert moments.std**2 == pytest.approx(statistics.pvariance(seen), abs=1e-9)


def test_normalisation_by_hand():
    first, second = fp64([1.0, 3.0]), fp64([5.0, 7.0, 9.0])
    moments = RunningMoments().update(*reward_moments(first).tolist())
    assert normalize_reward(first, moments, eps=0).tolist() == [-1.0, 1.0]
    moments.update(*reward_moments(second).tolist())
    assert moments == RunningMoments(5.0, 5.0, 40.0)
    assert normalize_reward(second, moments, eps=0).tolist() == pytest.approx([0.0, 2 / 8**0.5, 4 / 8**0.5])
    assert normalize_reward(second, moments, eps=0.5).tolist() == pytest.approx([0, 2 / (8**0.5 + 0.5), 4 / 3.3284271])
    whole = normalize_reward(second[:2], RunningMoments().update(*reward_moments(second).tolist()), eps=0)
    assert whole.tolist() == pytest.approx([-2 / (8 / 3) ** 0.5, 0.0])


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, -7.3, 1e6])
def test_normalised_equal_rewards_are_nothing(value):
    reward_B = torch.full((7,), value, dtype=torch.float64)
    moments = RunningMoments()
    for _ in range(5):
        moments.update(*reward_moments(reward_B).tolist())
        got = normalize_reward(reward_B, moments)
        assert bool((got.abs() < 1e-3).all()) and bool((got == got[0]).all())


def test_moments_say_what_is_wrong():
    with pytest.raises(ValueError, match="sums of rewards are not finite"):
        RunningMoments().update(2.0, math.nan, 1.0)
    with pytest.raises(AssertionError):
        normalize_reward(torch.ones(1), RunningMoments())


# ── tokens ───────────────────────────────────────────────────────────────────

# Three sequences: prompt tokens first, a tool's words inside the second one, the third without a sampled token.
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 0, 0]).bool()
SEQ = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])


def test_outcome_stands_on_the_last_sampled_token():
    reward_B = torch.tensor([0.25, -2.0, 9.0])
    assert place_outcome(reward_B, MASK, SEQ).tolist() == [0, 0, 0.25, 0, 0, 0, -2.0, 0, 0, 0]
    assert torch.equal(token_rewards(reward_B, None, 0.1, MASK, SEQ), place_outcome(reward_B, MASK, SEQ))
    kl_T = torch.where(MASK, torch.arange(10.0), math.nan)
    expected = [0, -0.5, -0.75, 0, -2.0, 0, -5.0, 0, 0, 0]
    assert token_rewards(reward_B, kl_T, 0.5, MASK, SEQ).tolist() == expected


def test_rewards_of_turns_stand_where_they_fell_and_the_rest_on_the_last_turn():
    """The turns of the second sequence were made in another order than they stand."""
    reward_B = torch.tensor([0.25, -2.0, 9.0])
    turn_T = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0])
    fell_T = torch.where(MASK, torch.tensor([0, 0.5, 1, 0, 0, 0, -4.0, 0, 0, 0]), math.nan)
    assert place_outcome(reward_B, MASK, SEQ, turn_T).tolist() == [0, 0, 0.25, 0, -2.0, 0, 0, 0, 0, 0]
    got = token_rewards(reward_B, None, 0.0, MASK, SEQ, turn_T, fell_T)
    assert got.tolist() == [0, 0.5, 0.25 - 0.5, 0, 2.0, 0, -4.0, 0, 0, 0]
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, SEQ, got)
    assert sums.tolist() == [0.25, -2.0, 0.0], "a sequence's rewards add up to its reward"
    fell_T[1] = math.inf
    with pytest.raises(ValueError, match=r"reward of a turn is not finite in sequences \[0\]: look at the environment"):
        token_rewards(reward_B, None, 0.0, MASK, SEQ, turn_T, fell_T)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.lists(st.booleans(), min_size=1, max_size=6)), max_size=6))
def test_token_rewards_match_a_loop(sequences):
    reward_B = fp64([r for r, _ in sequences])
    mask_T = torch.tensor([m for _, mask in sequences for m in mask], dtype=torch.bool)
    seq_T = torch.tensor([i for i, (_, mask) in enumerate(sequences) for _ in mask], dtype=torch.int64)
    kl_T = torch.sin(torch.arange(len(mask_T), dtype=torch.float64))
    expected = []
    for reward, mask in sequences:
        for t, sampled in enumerate(mask):
            outcome = reward if sampled and not any(mask[t + 1 :]) else 0.0
            expected.append(outcome - 0.3 * math.sin(len(expected)) if sampled else 0.0)
    got = token_rewards(reward_B, kl_T, 0.3, mask_T, seq_T)
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, abs=1e-12)


def test_overlong_mask():
    cut_B = torch.tensor([False, True, False])
    expected = [m and s != 1 for m, s in zip(MASK.tolist(), SEQ.tolist(), strict=True)]
    assert overlong_mask(MASK, SEQ, cut_B).tolist() == expected
    assert torch.equal(overlong_mask(MASK, SEQ, torch.zeros(3).bool()), MASK)
    with pytest.raises(ValueError, match="cut must be bool"):
        overlong_mask(MASK, SEQ, torch.zeros(3))
    with pytest.raises(ValueError, match="mask must be bool"):
        overlong_mask(MASK.long(), SEQ, cut_B)


def test_token_inputs_are_checked():
    kl_T = torch.zeros(10)
    kl_T[[4, 6]] = math.inf
    with pytest.raises(ValueError, match=r"KL to the reference is not finite in sequences \[1\]"):
        token_rewards(torch.zeros(3), kl_T, 0.1, MASK, SEQ)
    with pytest.raises(ValueError, match=r"must both be \[T\]"):
        token_rewards(torch.zeros(3), kl_T[:4], 0.1, MASK, SEQ)
    with pytest.raises(ValueError, match="mask must be bool"):
        place_outcome(torch.zeros(3), MASK, SEQ[:5])


# ── what every function of rewards does ──────────────────────────────────────

OF_REWARDS = {
    "clip_reward": lambda r: clip_reward(r, -1, 1),
    "reward_moments": reward_moments,
    "normalize_reward": lambda r: normalize_reward(r, RunningMoments(3.0, 1.0, 2.0)),
    "place_outcome": lambda r: place_outcome(r, MASK, SEQ),
    "token_rewards": lambda r: token_rewards(r, None, 0.0, MASK, SEQ),
}


@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_nan_reward_is_named(name):
    with pytest.raises(ValueError, match=r"rewards are not finite \(sequence 2: nan\)"):
        OF_REWARDS[name](torch.tensor([0.0, 1.0, math.nan]))
    with pytest.raises(ValueError, match=r"rewards must be \[B\]"):
        OF_REWARDS[name](torch.zeros(3, 1))


def test_a_rank_may_have_no_sequence():
    zero = torch.zeros(0)
    none, no_mask = zero.long(), zero.bool()
    moments = RunningMoments().update(*reward_moments(zero).tolist())
    assert moments == RunningMoments() and moments.std == 0.0
    for got in (
        overlong_punishment(none, 100, 20),
        length_penalty_linear(none, 100, 1.0),
        length_penalty_group(none, no_mask, none),
        clip_reward(zero, 0, 1),
        normalize_reward(zero, moments),
        place_outcome(zero, no_mask, none),
        token_rewards(zero, zero, 0.1, no_mask, none),
    ):
        assert got.shape == (0,) and got.dtype == torch.float64
    assert overlong_mask(no_mask, none, no_mask).shape == (0,)
