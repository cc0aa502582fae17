"""Turns reward-function scores into training rewards: length terms, bounds, normalisation, masks.

B: sequences; T: packed tokens. Tensors are on the CPU. Terms and shaped rewards are fp64 [B], and the caller adds the
terms to the reward. The batch may be empty, because a rank may have no sequences. Functions raise ValueError for
mismatched shapes or rewards that are not finite.
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

    The term is 0 up to a length of longest - buffer tokens, falls linearly to -factor at `longest` tokens, and stays
    -factor for longer sequences.

    length_B: number of tokens that count towards the limit. longest: the limit in tokens. buffer: the punishment
    starts this many tokens before the limit. Raises ValueError if `buffer` is not in 1 .. longest or `factor` is
    negative.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"the overlong buffer must be in 1 .. {longest} (the longest response), got {buffer}")
    if factor < 0:
        raise ValueError(f"the factor of the overlong punishment must be >= 0, got {factor}")
    left_B = (longest - buffer) - finite_column(length_B, "lengths")
    return factor * (left_B / buffer).clamp(-1.0, 0.0)


def length_penalty_linear(length_B: torch.Tensor, longest: int, coef: float) -> torch.Tensor:
    """Return the linear length penalty, the term -coef * length / longest.

    Source: https://arxiv.org/abs/2310.03716, where the coefficient is the running std of the rewards. The paper's
    constant term is omitted, because a baseline cancels it.

    length_B: number of tokens that count towards the limit. longest: the limit in tokens, constant during the run.
    coef: a negative value rewards longer sequences. Raises ValueError if `longest` is not positive.
    """
    if not longest > 0:
        raise ValueError(f"the longest response must be > 0 tokens, got {longest}")
    return -coef * finite_column(length_B, "lengths") / longest


def length_penalty_group(
    length_B: torch.Tensor, correct_B: torch.Tensor, group_B: torch.Tensor, coef: float = 1.0
) -> torch.Tensor:
    """Return Kimi k1.5's length reward, a term in [-coef / 2, coef / 2] that is larger for shorter samples.

    Source: https://arxiv.org/abs/2501.12599

    lambda = 0.5 - (length - shortest) / (longest - shortest), where shortest and longest are the minimum and maximum
    length in the group. The term is coef * lambda for a correct sequence, coef * min(0, lambda) for a wrong one, and 0
    if all lengths of the group are equal.

    length_B: number of sampled tokens. correct_B: bool, whether the answer is correct. group_B: int64, any numbering.
    The caller must pass all samples of each group. Raises ValueError if `correct_B` is not bool.
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
    """Return the loss mask without sequences truncated by the length limit (overlong filtering), bool [T].

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.4

    mask_T: bool [T]. seq_T: int64 [T], sequence index of each token. cut_B: bool [B], True if the sequence was
    truncated. Compute the batch totals (`count_totals`) from the new mask, so that they exclude truncated sequences.
    The rewards of truncated sequences still count in their groups' statistics.
    """
    _check_tokens(mask_T, seq_T)
    if cut_B.dtype != torch.bool or cut_B.ndim != 1:
        raise ValueError(f"cut must be bool [B], got {cut_B.dtype} {list(cut_B.shape)}")
    return mask_T & ~cut_B[seq_T]


# ── scale ────────────────────────────────────────────────────────────────────


def clip_reward(reward_B: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the rewards clipped to [low, high].

    Source: https://doi.org/10.1038/nature14236; for language models https://arxiv.org/abs/2307.04964

    low, high: bounds; -inf and inf mean no bound. Raises ValueError if low is above high.
    """
    if not low <= high:
        raise ValueError(f"reward clipping needs low <= high, got {low} and {high}")
    return finite_column(reward_B).clamp(low, high)


@dataclass
class RunningMoments:
    """Mean and std of all rewards of the run so far, with equal weights. Identical on every rank.

    Source: Chan, Golub, LeVeque 1979, for joining two sets of moments

    Values are Python floats. A step's std is computed from a sum of squares, so it loses precision if it is small
    compared to the mean: about four digits are correct if the mean is 1e6 times the std.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Return the population std, or 0 before the first reward."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, count: float, total: float, total_sq: float) -> "RunningMoments":
        """Add a step's rewards, and return self.

        count, total, total_sq: the result of `reward_moments`, summed over ranks. Raises ValueError if one is not
        finite.
        """
        if not all(map(math.isfinite, (count, total, total_sq))):
            raise ValueError(f"sums of rewards are not finite: {count}, {total}, {total_sq}; check the reward function")
        assert count >= 0, count
        if count:
            mean = total / count
            distance, both = mean - self.mean, self.count + count
            # Rounding can make the sum of squared distances of equal rewards negative.
            self.m2 += max(total_sq - total * mean, 0.0) + distance**2 * self.count * count / both
            self.mean += distance * count / both
            self.count = both
        return self


def reward_moments(reward_B: torch.Tensor) -> torch.Tensor:
    """Return count, sum and sum of squares of this rank's rewards, fp64 [3]. The caller sums them over ranks."""
    reward_B = finite_column(reward_B)
    return torch.stack([torch.tensor(len(reward_B), dtype=torch.float64), reward_B.sum(), reward_B.square().sum()])


NORMAL_EPS = 1e-6
"""Added to the std before dividing by it, to avoid division by 0."""


def normalize_reward(reward_B: torch.Tensor, moments: RunningMoments, eps: float = NORMAL_EPS) -> torch.Tensor:
    """Return (reward - mean) / (std + eps). The std is the population std, without the n - 1 correction.

    Source: https://arxiv.org/abs/2307.04964

    moments: reward mean and std of the run so far, or of one step. The moments must already include this step's rewards
    (`RunningMoments.update`).
    """
    reward_B = finite_column(reward_B)
    assert moments.count > 0 or not len(reward_B), "update the moments with this step's rewards before normalising"
    return (reward_B - moments.mean) / (moments.std + eps)


# ── tokens ───────────────────────────────────────────────────────────────────


def place_outcome(
    reward_B: torch.Tensor, mask_T: torch.Tensor, seq_T: torch.Tensor, turn_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Place each sequence's reward on its last sampled token, with 0 elsewhere: fp64 [T].

    mask_T: bool [T], True where the policy sampled. seq_T: int64 [T], sequence index of each token. turn_T: int64 [T],
    turn index of each token. If `turn_T` is given, the reward is placed on the last sampled token of the last turn. The
    reward of a sequence without sampled tokens is dropped.
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
    """Return the reward of each token: the outcome on the last sampled token, minus kl_coef * KL at every token.

    Source: https://arxiv.org/abs/1909.08593 (KL in the reward)

    The result is fp64 [T], 0 where the mask is False, whatever the inputs are there. kl_T: [T], estimate of KL(policy
    || reference) in nats, or None for no KL term. turn_T: [T], turn index of each token. turn_reward_T: [T], the part
    of `reward_B` that each turn earned, on one of the turn's tokens. The remainder of `reward_B` is the outcome, which
    is placed on the last turn. Without the KL term, a sequence's rewards add up to `reward_B`. Raises ValueError if a
    KL estimate or turn reward is not finite where the mask is True. The message lists the sequences.
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
    """Return x in fp64, 0 where the mask is False.

    name: name of x, for error messages. look: what the message tells the user to look at if a value is not finite.
    """
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
