"""Inputs and outputs of policy losses, and helpers that they share. T: packed tokens of one micro-batch."""

from dataclasses import dataclass

import torch

from spmdrl.algos.aggregate import sum_per_sequence

LOG_RATIO_LIMIT = 20.0
"""Maximum absolute log ratio. Log ratios are clamped to it before exp, so that one bad token cannot make the loss
inf."""

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss [T], and a dict of name -> detached statistic [T]. All are 0 where the mask is False."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs to a policy loss, all packed [T]. The log-probabilities are those of the sampled tokens, in nats."""

    logp: torch.Tensor
    """Log-probability under the current policy, with gradient."""
    old_logp: torch.Tensor
    """Log-probability under the policy at the start of the step, without gradient."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True where the policy sampled. Elsewhere, the other tensors may have any value, even nan."""
    seq: torch.Tensor
    """int64, ascending: sequence index of each token in this micro-batch. Sequences are never split, so a loss can sum
    over them. All paths of a branching episode form one sequence, in which the mask is True only once for each sampled
    token."""
    entropy: torch.Tensor | None = None
    """Entropy of the current policy at this token, nats, with gradient."""
    ref_logp: torch.Tensor | None = None
    rollout_logp: torch.Tensor | None = None
    """Log-probability that the engine reported when it sampled the token."""
    weights: torch.Tensor | None = None
    """Importance weights, without gradient. The loss is multiplied by them to correct for rollout_logp differing from
    old_logp."""
    selected: torch.Tensor | None = None
    """bool: True at the tokens that `Loss.select` selected from the whole batch. None for losses without `select`."""
    sequences: int | None = None
    """Number of sequences in this micro-batch. If None, sequence sums read the number from `seq`, which causes a device
    sync."""


def masked(value_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return the values where the mask is True, and exactly 0 elsewhere. Where the mask is False, the gradient is 0,
    too.
    """
    # Losses call this on their inputs before any arithmetic, because nan times 0 is still nan, also in the gradient.
    return torch.where(mask_T, value_T, 0.0)


def log_ratio_of(x: LossInputs) -> torch.Tensor:
    """Return the unclamped log ratio logp - old_logp, [T], with 0 where the mask is False."""
    return masked(x.logp, x.mask) - masked(x.old_logp, x.mask)


def exp_clamped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Clamp the log ratio to +-20 and return its exp. The gradient is 0 where it is clamped."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_stats(ratio_T: torch.Tensor, log_ratio_T: torch.Tensor, x: LossInputs) -> dict[str, torch.Tensor]:
    """Return the stats `ratio` and `old_kl`, as defined in the docstring of `token_losses.py`."""
    return {"ratio": masked(ratio_T.detach().to(log_ratio_T.dtype), x.mask), "old_kl": -log_ratio_T.detach()}


def clipped_surrogate(
    advantages_T: torch.Tensor, ratio_T: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -A r and -A clip(r, 1 - clip_low, 1 + clip_high). PPO's loss is the larger of the two."""
    return -advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)


def weighted(loss_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Multiply the loss by the importance weights, if there are any."""
    return loss_T if x.weights is None else loss_T * masked(x.weights, x.mask)


def sequence_sum(value_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return, at each token, the sum over its sequence's unmasked tokens: fp64 [T], 0 at masked tokens."""
    return masked(sum_per_sequence(masked(value_T, x.mask), x.seq, x.sequences)[x.seq], x.mask)


def sequence_mean(value_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return, at each token, the mean over its sequence's unmasked tokens: fp64 [T], 0 at masked tokens."""
    # The clamp avoids 0 / 0 for a sequence without an unmasked token.
    return sequence_sum(value_T, x) / sum_per_sequence(x.mask, x.seq, x.sequences).clamp(min=1)[x.seq]


def sequence_weighted(loss_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Multiply a sequence-level loss by the geometric mean of the sequence's importance weights.

    If all weights are equal, the factor is that weight. If one weight is 0, the factor is 0.
    """
    if x.weights is None:
        return loss_T
    # A weight of 0 has the log -inf, so the mean is -inf and its exp is 0. The weights have no gradient.
    return loss_T * masked(sequence_mean(masked(x.weights.detach().double(), x.mask).log(), x).exp(), x.mask)


def check_clip(clip_low: float, clip_high: float, most_low: float = float("inf")) -> None:
    """Raise ValueError if a clip width is negative, or if `clip_low` is above `most_low`."""
    if not clip_low >= 0 or not clip_high >= 0:
        raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}")
    if clip_low > most_low:
        raise ValueError(
            f"clip_low must be at most {most_low:g}, got {clip_low}: {most_low:g} clips nothing from below"
        )
