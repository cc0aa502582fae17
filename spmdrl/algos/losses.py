"""Per-token policy losses: plain functions over one dataclass of inputs. T: packed tokens of one micro-batch.

A loss is `f(x: LossInputs, **settings) -> (loss_T, stats)`: loss_T before aggregation (`aggregate.token_weights` turns
it into a number), stats a dict of detached [T] tensors, 0 where the mask is False, so that their sum over all tokens
divided by the unmasked ones is the mean.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""|logp - old_logp| is clamped here before exp, so that one broken token cannot make the whole batch inf."""

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss may look at, all packed [T]; log-probabilities are of the sampled tokens, in nats."""

    logp: torch.Tensor
    """Current policy, with gradient."""
    old_logp: torch.Tensor
    """Policy at the start of the step, no gradient."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True where the policy sampled. Elsewhere the other tensors may hold anything, nan included."""
    seq: torch.Tensor
    """int64, index of the token's sequence in this micro-batch."""
    entropy: torch.Tensor | None = None
    """Entropy of the current policy at this token, nats, with gradient."""
    ref_logp: torch.Tensor | None = None
    rollout_logp: torch.Tensor | None = None
    """As reported by the engine."""
    weights: torch.Tensor | None = None
    """Importance weights that multiply the loss (correction for rollout_logp != old_logp), no gradient."""


def ppo_clip(
    x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> LossResult:
    """PPO's clipped surrogate.

    Source: https://arxiv.org/abs/1707.06347

    loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp), log ratio clamped to +-20.
    clip_high > clip_low is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). dual_clip: for A < 0 the loss is at
    most -A dual_clip (https://arxiv.org/abs/1912.09729), None for no such bound.

    Stats: `ratio`; `old_kl` = old_logp - logp, the k1 estimate of KL(old || current); `clip_fraction`, 1 where the clip
    decided the loss; `dual_clip_fraction` (only with dual_clip), 1 where that bound did. ValueError: negative clip,
    dual_clip not above 1.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1 (3 is usual), or None for off, got {dual_clip}")
    advantages = _masked(x.advantages, x.mask)
    log_ratio = _masked(x.logp, x.mask) - _masked(x.old_logp, x.mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    stats = {
        "ratio": _masked(ratio.detach(), x.mask),
        "old_kl": -log_ratio.detach(),
        "clip_fraction": (clipped > unclipped).to(ratio.dtype),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        stats["dual_clip_fraction"] = ((advantages < 0) & (loss > bound)).to(ratio.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return _weighted(loss, x), stats


def reinforce(x: LossInputs) -> LossResult:
    """REINFORCE: the score-function loss -A logp, with no ratio and no clip.

    Source: https://doi.org/10.1007/BF00992696

    On-policy: right for one optimizer step per rollout. Stats: `old_kl` = old_logp - logp, which shows how far
    off-policy it is.
    """
    logp = _masked(x.logp, x.mask)
    loss = -_masked(x.advantages, x.mask) * logp
    return _weighted(loss, x), {"old_kl": _masked(x.old_logp, x.mask) - logp.detach()}


LOSSES: dict[str, Callable[..., LossResult]] = {"ppo_clip": ppo_clip, "reinforce": reinforce}


def _masked(value_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    # On the inputs, before any arithmetic: a nan multiplied by 0 later is still nan, in the gradient too.
    return torch.where(mask_T, value_T, 0.0)


def _weighted(loss_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    return loss_T if x.weights is None else loss_T * _masked(x.weights, x.mask)
