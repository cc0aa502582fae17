"""Turns the scores of a reward function into the rewards to learn from: length terms, bounds, normalisation, masks.

B: sequences, T: packed tokens, both on the host. Terms and shaped rewards are fp64 [B]; a term is to be added to the
reward. The batch may be empty (a rank without sequences). ValueError: shapes that do not fit, a reward that is not
finite.
"""

import math
from dataclasses import dataclass

import torch

from spmdrl.algos.groups import finite_column, grouped
from spmdrl.algos.samples import at_last_sampled

# ── length ───────────────────────────────────────────────────────────────────


def overlong_punishment(length_B: torch.Tensor, longest: int, buffer: int, factor: float = 1.0) -> torch.Tensor:
    """Return the soft overlong punishment, a term in [-factor, 0].

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13

    0 up to longest - buffer tokens, from there linear down to -factor at `longest`, and -factor beyond.

    length_B: tokens that the limit counts. longest: the limit on them. buffer: how many tokens before the limit the
    punishment begins. ValueError: buffer not in 1 .. longest, negative factor.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"the overlong buffer must be in 1 .. {longest} (the longest response), got {buffer}")
    if factor < 0:
        raise ValueError(f"the factor of the overlong punishment must be >= 0, got {factor}")
    left_B = (longest - buffer) - finite_column(length_B, "lengths")
    return factor * (left_B / buffer).clamp(-1.0, 0.0)


def length_penalty_linear(length_B: torch.Tensor, longest: int, coef: float) -> torch.Tensor:
    """Return the linear length penalty, a term: -coef * length / longest.

    Source: https://arxiv.org/abs/2310.03716, where the coefficient is the running std of the rewards. Its constant is
    left out here, because a baseline cancels it.

    length_B: tokens that the limit counts. longest: the limit on them, a constant of the run. A negative coef rewards
    length. ValueError: longest not positive.
    """
    if not longest > 0:
        raise ValueError(f"the longest response must be > 0 tokens, got {longest}")
    return -coef * finite_column(length_B, "lengths") / longest


def length_penalty_group(
    length_B: torch.Tensor, correct_B: torch.Tensor, group_B: torch.Tensor, coef: float = 1.0
) -> torch.Tensor:
    """Kimi k1.5's length reward, a term in [-coef / 2, coef / 2]: shorter than the other samples is better.

    Source: https://arxiv.org/abs/2501.12599

    lambda = 0.5 - (length - shortest) / (longest - shortest), over all samples of the group: coef * lambda for a
    correct sequence, coef * min(0, lambda) for a wrong one. 0 where all lengths of the group are equal.

    length_B: sampled tokens. correct_B: bool. group_B: int64, any numbering; the caller gives every sample of each
    group, as a part of it may lack the shortest or longest. ValueError: correct not bool.
    """
    length_B, groups = grouped(length_B, group_B, "lengths")
    if correct_B.dtype != torch.bool or correct_B.shape != length_B.shape:
        raise ValueError(f"correct must be bool {list(length_B.shape)}, got {correct_B.dtype} {list(correct_B.shape)}")
    shortest_B, longest_B = groups.low(length_B), groups.high(length_B)
    spread_B = longest_B - shortest_B
    lambda_B = 0.5 - (length_B - shortest_B) / torch.where(spread_B > 0, spread_B, 1.0)
    reward_B = torch.where(correct_B, lambda_B, lambda_B.clamp(max=0.0))
    return torch.where(spread_B > 0, coef * reward_B, 0.0)


def overlong_mask(mask_T: torch.Tensor, seq_T: torch.Tensor, cut_B: torch.Tensor) -> torch.Tensor:
    """Return the loss mask without the sequences that the length limit cut off (overlong filtering), bool [T].

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.4

    mask_T: bool [T]. seq_T: int64 [T], the token's sequence. cut_B: bool [B], True where the sequence ended at the
    limit. A sequence without unmasked tokens drops out of the totals too: count them afterwards. Its reward still
    counts in the statistics of its group.
    """
    _check_tokens(mask_T, seq_T)
    if cut_B.dtype != torch.bool or cut_B.ndim != 1:
        raise ValueError(f"cut must be bool [B], got {cut_B.dtype} {list(cut_B.shape)}")
    return mask_T & ~cut_B[seq_T]


# ── scale ────────────────────────────────────────────────────────────────────


def clip_reward(reward_B: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return rewards bounded to [low, high].

    Source: https://doi.org/10.1038/nature14236; for language models https://arxiv.org/abs/2307.04964

    -inf or inf for no bound on that side. ValueError: low above high.
    """
    if not low <= high:
        raise ValueError(f"reward clipping needs low <= high, got {low} and {high}")
    return finite_column(reward_B).clamp(low, high)


@dataclass
class RunningMoments:
    """Mean and spread of all rewards of the run so far, with equal weight; the same on every rank.

    Source: Chan, Golub, LeVeque 1979, for joining two sets of moments

    Plain fp64 numbers. A step's spread comes from its sum of squares, so it loses digits as (mean / std)^2 grows:
    rewards around 1e6 times their std keep four.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Return the population std, 0 before the first reward."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, count: float, total: float, total_sq: float) -> "RunningMoments":
        """Add a step, and return self. Arguments: `reward_moments`, summed over ranks. ValueError: not finite."""
        if not all(map(math.isfinite, (count, total, total_sq))):
            raise ValueError(f"sums of rewards are not finite: {count}, {total}, {total_sq}; check the reward function")
        assert count >= 0, count
        if count:
            mean = total / count
            distance, both = mean - self.mean, self.count + count
            # Rounding can leave the spread of equal rewards below 0.
            self.m2 += max(total_sq - total * mean, 0.0) + distance**2 * self.count * count / both
            self.mean += distance * count / both
            self.count = both
        return self


def reward_moments(reward_B: torch.Tensor) -> torch.Tensor:
    """Return count, sum and sum of squares of these rewards, fp64 [3]; sums over ranks give the global ones."""
    reward_B = finite_column(reward_B)
    return torch.stack([torch.tensor(len(reward_B), dtype=torch.float64), reward_B.sum(), reward_B.square().sum()])


NORMAL_EPS = 1e-6
"""Added to the std that rewards are divided by."""


def normalize_reward(reward_B: torch.Tensor, moments: RunningMoments, eps: float = NORMAL_EPS) -> torch.Tensor:
    """Return (reward - mean) / (std + eps) by moments, of the run so far or of one step.

    Source: https://arxiv.org/abs/2307.04964

    moments: must hold at least one reward; `update` with this step's rewards comes first. Population std.
    """
    reward_B = finite_column(reward_B)
    assert moments.count > 0 or not len(reward_B), "update the moments with this step's rewards before normalising"
    return (reward_B - moments.mean) / (moments.std + eps)


# ── tokens ───────────────────────────────────────────────────────────────────


def place_outcome(
    reward_B: torch.Tensor, mask_T: torch.Tensor, seq_T: torch.Tensor, turn_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each sequence's reward at its last sampled token, with turns that of its last turn: fp64 [T].

    mask_T: bool [T], True where the policy sampled. seq_T: int64 [T], the token's sequence. turn_T: int64 [T], the
    token's turn. A sequence without a sampled token has no place for its reward, which is left out.
    """
    _check_tokens(mask_T, seq_T)
    return at_last_sampled(finite_column(reward_B), mask_T, seq_T, turn_T)


def token_rewards(
    reward_B: torch.Tensor,
    kl_T: torch.Tensor | None,
    kl_coef: float,
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    turn_T: torch.Tensor | None = None,
    turn_reward_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the reward of each token: the outcome at the last sampled one, minus kl_coef * KL at all. fp64 [T].

    Source: https://arxiv.org/abs/1909.08593 (KL in the reward)

    kl_T: [T], estimate of KL(policy || reference), nats; None: the reward has no KL term. turn_T, turn_reward_T: [T],
    the turn of each token and the part of `reward_B` that fell there; the rest of it is the outcome, which stands on
    the last turn, so a sequence's rewards add up to `reward_B`. All may hold anything outside the mask; the result is
    0 there. ValueError: a KL or a turn's reward under the mask that is not finite, naming the sequences.
    """
    rewards_T = place_outcome(reward_B, mask_T, seq_T, turn_T)
    if turn_reward_T is not None:
        turns_T = _under_mask("the reward of a turn", "the environment", turn_reward_T, mask_T, seq_T)
        of_turns_B = torch.zeros(len(reward_B), dtype=torch.float64).index_add_(0, seq_T, turns_T)
        rewards_T = rewards_T + turns_T - place_outcome(of_turns_B, mask_T, seq_T, turn_T)
    if kl_T is None:
        return rewards_T
    look = "grad_norm of the steps before, and the reference's logp"
    return rewards_T - kl_coef * _under_mask("the KL to the reference", look, kl_T, mask_T, seq_T)


def _under_mask(name: str, look: str, x_T: torch.Tensor, mask_T: torch.Tensor, seq_T: torch.Tensor) -> torch.Tensor:
    """Return a number of each token in fp64, 0 where the mask is False. look: advice if it is not finite."""
    if x_T.shape != mask_T.shape:
        raise ValueError(f"{name} and the mask must both be [T], got {list(x_T.shape)} and {list(mask_T.shape)}")
    x_T = torch.where(mask_T, x_T.detach().double(), 0.0)
    if len(bad := torch.unique(seq_T[~torch.isfinite(x_T)])):
        raise ValueError(f"{name} is not finite in sequences {bad[:8].tolist()}: look at {look}")
    return x_T


def _check_tokens(mask_T: torch.Tensor, seq_T: torch.Tensor) -> None:
    if mask_T.dtype != torch.bool or mask_T.ndim != 1 or mask_T.shape != seq_T.shape:
        raise ValueError(
            f"mask must be bool [T] and seq int64 [T], got {mask_T.dtype} {list(mask_T.shape)} and {list(seq_T.shape)}"
        )
