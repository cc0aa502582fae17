"""Inputs and results of policy losses, and the steps that losses share. T: packed tokens of one micro-batch."""

from dataclasses import dataclass

import torch

from spmdrl.algos.aggregate import sum_per_sequence

LOG_RATIO_LIMIT = 20.0
"""A log ratio is clamped here before exp, so that one broken token cannot make the whole batch inf."""

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""loss_T and named stats, detached [T], both 0 where the mask is False."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss, all packed [T]; log-probabilities are of the sampled tokens, in nats."""

    logp: torch.Tensor
    """Current policy, with gradient."""
    old_logp: torch.Tensor
    """Policy at the start of the step, no gradient."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True where the policy sampled. Elsewhere the other tensors may hold anything, nan included."""
    seq: torch.Tensor
    """int64, ascending: the token's sequence in this micro-batch, never cut, so a loss may sum over it. All paths of an
    episode that branches are one sequence, of which each sampled token is under the mask once."""
    entropy: torch.Tensor | None = None
    """Entropy of the current policy at this token, nats, with gradient."""
    ref_logp: torch.Tensor | None = None
    rollout_logp: torch.Tensor | None = None
    """The engine's log-probability."""
    weights: torch.Tensor | None = None
    """Importance weights that multiply the loss (correction for rollout_logp != old_logp), no gradient."""
    selected: torch.Tensor | None = None
    """bool: tokens that were selected over the whole batch beforehand, for the losses with a `select`."""


def masked(value_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return the value where the mask is True, else exactly 0, in the gradient too."""
    # On the inputs, before any arithmetic: a nan multiplied by 0 later is still nan, in the gradient too.
    return torch.where(mask_T, value_T, 0.0)


def log_ratio_of(x: LossInputs) -> torch.Tensor:
    """Return logp - old_logp, [T], not clamped; 0 where the mask is False."""
    return masked(x.logp, x.mask) - masked(x.old_logp, x.mask)


def exp_clamped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Return exp of the log ratio clamped to +-20; no gradient beyond."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_stats(ratio_T: torch.Tensor, log_ratio_T: torch.Tensor, x: LossInputs) -> dict[str, torch.Tensor]:
    """Return the stats `ratio` and `old_kl`."""
    return {"ratio": masked(ratio_T.detach().to(log_ratio_T.dtype), x.mask), "old_kl": -log_ratio_T.detach()}


def clipped_surrogate(
    advantages_T: torch.Tensor, ratio_T: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's -A r and -A clip(r, 1 - clip_low, 1 + clip_high), of which the larger is the loss."""
    return -advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)


def weighted(loss_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return the loss times the token's importance weight, if there are weights."""
    return loss_T if x.weights is None else loss_T * masked(x.weights, x.mask)


def sequence_sum(value_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return at every unmasked token the sum of value over those of its sequence; 0 elsewhere; fp64 [T]."""
    return masked(sum_per_sequence(masked(value_T, x.mask), x.seq)[x.seq], x.mask)


def sequence_mean(value_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return the mean in the way of `sequence_sum`."""
    # A count of 0 belongs to a sequence without any unmasked token, whose sum is 0.
    return sequence_sum(value_T, x) / sum_per_sequence(x.mask, x.seq).clamp(min=1)[x.seq]


def sequence_weighted(loss_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Return a loss with one number per sequence times the geometric mean of the sequence's importance weights.

    Where all tokens have the sequence's weight, that is the weight. A token of weight 0 takes its whole sequence out.
    """
    if x.weights is None:
        return loss_T
    # log 0 = -inf, whose mean is -inf and whose exp is the 0 that is meant; the weights carry no gradient.
    return loss_T * masked(sequence_mean(masked(x.weights.detach().double(), x.mask).log(), x).exp(), x.mask)


def check_clip(clip_low: float, clip_high: float, most_low: float = float("inf")) -> None:
    """Check that the clip widths are not negative and the lower one is at most `most_low`; ValueError otherwise."""
    if not clip_low >= 0 or not clip_high >= 0:
        raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}")
    if clip_low > most_low:
        raise ValueError(
            f"clip_low must be at most {most_low:g}, got {clip_low}: {most_low:g} clips nothing from below"
        )
