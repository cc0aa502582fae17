"""Policy losses: plain functions over one dataclass of inputs. T: packed tokens of one micro-batch.

A loss is `f(x: LossInputs, **settings) -> (loss_T, stats)`: loss_T before aggregation (`aggregate.token_weights` turns
it into a number), stats a dict of detached [T] tensors, 0 where the mask is False, so that their sum over all tokens
divided by the unmasked ones is the mean. Stats that several losses share: `ratio` = exp(logp - old_logp); `old_kl` =
old_logp - logp, the k1 estimate of KL(old || current); `clip_fraction`, 1 where a clip decided the loss.

Every log ratio is clamped to +-20 before exp. `x.weights` multiplies every loss. A setting out of its range is a
ValueError that names it. Losses in which each token counts for itself are in this file; the others are imported from
the files beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from spmdrl.algos.covariance_losses import clip_cov, kl_cov
from spmdrl.algos.divergence_losses import dppo_kl, dppo_tv
from spmdrl.algos.loss_inputs import (
    LOG_RATIO_LIMIT,
    LossInputs,
    LossResult,
    check_clip,
    clipped_surrogate,
    exp_clamped,
    log_ratio_of,
    masked,
    ratio_stats,
    weighted,
)
from spmdrl.algos.selection import select_clip_cov, select_kl_cov
from spmdrl.algos.sequence_losses import gmpo, gspo, gspo_token, sppo

__all__ = ["LOG_RATIO_LIMIT", "LOSSES", "Loss", "LossInputs", "LossResult", "own_loss"]


def ppo(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> LossResult:
    """PPO's clipped surrogate.

    Source: https://arxiv.org/abs/1707.06347

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          for A < 0 at most -A dual_clip

    `clip_high` above `clip_low` is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). The dual clip is that of
    https://arxiv.org/abs/1912.09729; 3 is usual, None is off.

    Further stat: `dual_clip_fraction` (with `dual_clip`), the share of tokens where that bound decided.
    """
    check_clip(clip_low, clip_high, most_low=1.0)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (3 is usual), or None for off, got {dual_clip}")
    advantages = masked(x.advantages, x.mask)
    log_ratio = log_ratio_of(x)
    ratio = exp_clamped(log_ratio)

    unclipped, clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    loss = torch.maximum(unclipped, clipped)
    stats = ratio_stats(ratio, log_ratio, x) | {"clip_fraction": (clipped > unclipped).to(ratio.dtype)}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        stats["dual_clip_fraction"] = ((advantages < 0) & (loss > bound)).to(ratio.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return weighted(loss, x), stats


def cispo(x: LossInputs, *, clip_low: float = 1.0, clip_high: float = 0.28) -> LossResult:
    """CISPO: REINFORCE with a clipped importance weight that carries no gradient, so no token is dropped.

    Source: https://arxiv.org/abs/2506.13585

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp

    The paper sets no lower bound, which is `clip_low` 1 or more, and does not publish its `clip_high`: 0.28 is the
    value of
    https://modelscope.github.io/Trinity-RFT/en/main/_modules/trinity/algorithm/policy_loss_fn/cispo_policy_loss.html.

    `clip_fraction` is the share of tokens whose weight was clipped.
    """
    check_clip(clip_low, clip_high)
    log_ratio = log_ratio_of(x).detach()
    ratio = exp_clamped(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * masked(x.advantages, x.mask) * masked(x.logp, x.mask)
    was_clipped = masked((weight != ratio).to(ratio.dtype), x.mask)
    return weighted(loss, x), ratio_stats(ratio, log_ratio, x) | {"clip_fraction": was_clipped}


def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossResult:
    """SAPO: a sigmoid gate of the ratio in the place of a clip.

    Source: https://arxiv.org/abs/2511.20347

        loss = -A (4 / tau) sigmoid(tau (r - 1))          tau = tau_pos where A > 0, else tau_neg

    The gradient is that of the plain policy gradient at `r = 1` for any tau, and fades as `r` leaves 1, faster for a
    larger tau.

    Further stat: `gate`, the factor on the gradient, 4 p (1 - p) with p the sigmoid.
    """
    if not tau_pos > 0 or not tau_neg > 0:
        raise ValueError(f"tau_pos and tau_neg must be above 0, got {tau_pos} and {tau_neg}")
    advantages = masked(x.advantages, x.mask)
    log_ratio = log_ratio_of(x)
    ratio = exp_clamped(log_ratio)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    p = torch.sigmoid(tau * (ratio - 1))
    loss = -advantages * p * (4 / tau)
    gate = masked((4 * p * (1 - p)).detach(), x.mask)
    return weighted(loss, x), ratio_stats(ratio, log_ratio, x) | {"gate": gate}


def dro(x: LossInputs, *, beta: float = 0.05) -> LossResult:
    """DRO: policy gradient with a quadratic penalty on the log ratio, for data of any age.

    Source: https://arxiv.org/abs/2405.19107

        loss = -A logp + beta / 2 (logp - old_logp)^2

    It pulls each token towards `logp = old_logp + A / beta`. The paper writes it for whole responses, with a reference
    in the place of `old_logp`; the token form and its `beta` are those of
    https://tinker-docs.thinkingmachines.ai/tinker/losses/dro.

    Stats: `old_kl`; `penalty`, the quadratic term.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    log_ratio = log_ratio_of(x)
    penalty = 0.5 * beta * log_ratio.square()
    loss = -masked(x.advantages, x.mask) * masked(x.logp, x.mask) + penalty
    return weighted(loss, x), {"old_kl": -log_ratio.detach(), "penalty": penalty.detach()}


def reinforce(x: LossInputs) -> LossResult:
    """REINFORCE: the score-function loss, with no ratio and no clip.

    Source: https://doi.org/10.1007/BF00992696

        loss = -A logp

    It is right for one optimizer step per rollout.

    Stat: `old_kl`, which shows how far off-policy the samples are.
    """
    logp = masked(x.logp, x.mask)
    loss = -masked(x.advantages, x.mask) * logp
    return weighted(loss, x), {"old_kl": masked(x.old_logp, x.mask) - logp.detach()}


def gpg(x: LossInputs) -> LossResult:
    """GPG: the loss of `reinforce` as a mean over tokens, for GPG's advantage.

    Source: https://arxiv.org/abs/2504.02546
    """
    return reinforce(x)


@dataclass(frozen=True)
class Loss:
    """One policy loss: its function, whose keyword-only parameters are its settings, and the facts that others ask for.

    The paper stands in the function's docstring (`rows.paper_of`).
    """

    function: Callable[..., LossResult]
    aggregation: str = "token-mean"
    """Aggregation of the loss's paper, for a run that asks for no other."""
    scope: Literal["token", "sequence", "one per sequence"] = "token"
    """Tokens whose logp the loss of a token depends on: its own alone, or all of its sequence. `one per sequence`: all
    unmasked tokens of a sequence have the same loss (gspo's where advantages are equal), of which only the mean over
    sequences has a meaning, so the run's aggregation is always that of the row."""
    select: Callable[..., torch.Tensor] | None = None
    """Selects tokens over the whole batch beforehand, for `LossInputs.selected`; takes the settings of the loss."""
    has_ratio: bool = True
    """It weighs tokens by the ratio of the policy to old_logp, or by their distance."""
    skips: bool = True
    """A sequence whose advantage is 0 adds nothing, and may be left out of the forward."""


def own_loss(function: Callable[..., LossResult]) -> Loss:
    """The row of a user's own function; its attribute `token_separable` says that each token counts for itself.

    So does each token of a built-in loss of that scope which the user's file hands on.
    """
    built_in = any(loss.function is function and loss.scope == "token" for loss in LOSSES.values())
    separable = built_in or getattr(function, "token_separable", False)
    return Loss(function, scope="token" if separable else "sequence", skips=False)


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo),
    "gspo": Loss(gspo, "seq-mean-token-mean", "one per sequence", skips=False),
    "gspo_token": Loss(gspo_token, "seq-mean-token-mean", "sequence"),
    "cispo": Loss(cispo),
    "sapo": Loss(sapo, "seq-mean-token-mean"),
    "gmpo": Loss(gmpo, "seq-mean-token-mean", "one per sequence", skips=False),
    "kl_cov": Loss(kl_cov, select=select_kl_cov, skips=False),
    "clip_cov": Loss(clip_cov, select=select_clip_cov, skips=False),
    # Dr. GRPO's aggregation, which the authors recommend with it.
    "dppo_tv": Loss(dppo_tv, "seq-mean-token-sum-norm"),
    "dppo_kl": Loss(dppo_kl, "seq-mean-token-sum-norm"),
    # log p of a response is the sum over its tokens, here and in reinforce.
    "dro": Loss(dro, "seq-mean-token-sum", skips=False),
    "sppo": Loss(sppo, "seq-mean-token-mean", "one per sequence", skips=False),
    "gpg": Loss(gpg, has_ratio=False),
    "reinforce": Loss(reinforce, "seq-mean-token-sum", has_ratio=False),
}
