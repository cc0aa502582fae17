"""Token-level policy losses: the loss of a token depends only on that token. T: packed tokens of one micro-batch.

A loss is `f(x: LossInputs, **settings) -> (loss_T, stats)`. loss_T is not aggregated yet (see
`aggregate.token_weights`). stats is a dict of detached tensors [T] that are 0 where the mask is False, so the mean of a
stat is its sum divided by the number of unmasked tokens. Common stats: `ratio` = exp(logp - old_logp); `old_kl` =
old_logp - logp, the k1 estimate of KL(old || current); `clip_fraction`, 1 where a clip decides the loss.

Log ratios are clamped to +-20 before exp. Losses are multiplied by `x.weights`, if given. A setting that is out of
range raises a ValueError that names the setting. In formulas, `r` is the ratio of a token, `A` its advantage, and `sg`
stops the gradient.
"""

import torch

from spmdrl.algos.loss_inputs import (
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

REST_FLOOR = 1e-8
"""Added to 1 - p (the probability of all other tokens) to avoid division by 0 when p rounds to 1."""


def ppo(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> LossResult:
    """PPO: the clipped surrogate loss.

    Source: https://arxiv.org/abs/1707.06347

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          for A < 0 at most -A dual_clip

    Setting `clip_high` above `clip_low` gives DAPO's clip-higher (https://arxiv.org/abs/2503.14476). `dual_clip` is the
    bound from https://arxiv.org/abs/1912.09729. A value of 3 is typical, and None means no bound.

    With `dual_clip`, also reports `dual_clip_fraction`: the fraction of tokens whose loss is decided by the dual clip.
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
    """CISPO: REINFORCE with a clipped, detached importance weight, so that every token keeps its gradient.

    Source: https://arxiv.org/abs/2506.13585

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp

    `sg` stops the gradient. The paper uses no lower bound, which corresponds to a `clip_low` of 1 or more. The paper
    does not state its `clip_high`, and 0.28 is the value of
    https://modelscope.github.io/Trinity-RFT/en/main/_modules/trinity/algorithm/policy_loss_fn/cispo_policy_loss.html.

    `clip_fraction` is the fraction of tokens with a clipped weight.
    """
    check_clip(clip_low, clip_high)
    log_ratio = log_ratio_of(x).detach()
    ratio = exp_clamped(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * masked(x.advantages, x.mask) * masked(x.logp, x.mask)
    was_clipped = masked((weight != ratio).to(ratio.dtype), x.mask)
    return weighted(loss, x), ratio_stats(ratio, log_ratio, x) | {"clip_fraction": was_clipped}


def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossResult:
    """SAPO: a sigmoid gate on the ratio instead of a clip.

    Source: https://arxiv.org/abs/2511.20347

        loss = -A (4 / tau) sigmoid(tau (r - 1))          tau = tau_pos where A > 0, else tau_neg

    The gradient equals the gradient of `-A r` times a gate `4 p (1 - p)`, where `p` is the sigmoid. The gate is 1 where
    `r` is 1, for any tau. As `r` moves away from 1, the gate decreases, and it does so faster for a larger tau.

    Also reports `gate`.
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
    """DRO: policy gradient with a quadratic penalty on the log ratio, for off-policy data of any age.

    Source: https://arxiv.org/abs/2405.19107

        loss = -A logp + beta / 2 (logp - old_logp)^2

    The loss of each token is minimal at `logp = old_logp + A / beta`. The paper defines the loss for whole responses,
    with a reference instead of `old_logp`. The per-token loss and the default `beta` are those of
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
    """REINFORCE: minus the advantage times the log-probability, with no ratio and no clip.

    Source: https://doi.org/10.1007/BF00992696

        loss = -A logp

    The gradient is unbiased only with one optimizer step per rollout.

    Reports `old_kl`, which shows how far off-policy the samples are.
    """
    logp = masked(x.logp, x.mask)
    loss = -masked(x.advantages, x.mask) * logp
    return weighted(loss, x), {"old_kl": masked(x.old_logp, x.mask) - logp.detach()}


def gpg(x: LossInputs) -> LossResult:
    """GPG: the loss of `reinforce`, aggregated as a mean over tokens, for use with GPG's advantage.

    Source: https://arxiv.org/abs/2504.02546
    """
    return reinforce(x)


# ── DPPO ─────────────────────────────────────────────────────────────────────
# The trust region bounds a divergence between the old and the current policy. The divergence is estimated over two
# outcomes: the sampled token, and all other tokens combined.


def dppo_tv(x: LossInputs, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0) -> LossResult:
    """DPPO with total variation: drops tokens whose probability has moved too far in the direction of their advantage.

    Source: https://arxiv.org/abs/2602.04879; default clip widths from its launch script
    (https://verl.readthedocs.io/en/latest/algo/dppo.html)

        loss = -A sg(min(r, ratio_cap)) logp
               0 where A > 0 and p - p_old > clip_high, or A <= 0 and p_old - p > clip_low

    `sg` stops the gradient. The clip widths are probability differences in [0, 1]. Section 5.4 of the paper recommends
    a large `ratio_cap`.

    The stat `ratio` is not capped. `clip_fraction` is the fraction of dropped tokens. Also reports `cap_fraction`: the
    fraction of tokens that are kept with a capped ratio.
    """
    check_clip(clip_low, clip_high, most_low=1.0)
    moved = _probability(x.logp, x) - _probability(x.old_logp, x)
    keep = torch.where(masked(x.advantages, x.mask) > 0, moved <= clip_high, moved >= -clip_low)
    return _truncated(x, keep, ratio_cap)


def dppo_kl(x: LossInputs, *, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0) -> LossResult:
    """DPPO with KL: like `dppo_tv`, but limits KL(old || current) over two outcomes, the sampled token and all others.

    Source: https://arxiv.org/abs/2602.04879; default clip widths from its launch script
    (https://verl.readthedocs.io/en/latest/algo/dppo.html)

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
        loss = -A sg(min(r, ratio_cap)) logp
               0 where A > 0, p > p_old and D > clip_high, or A <= 0, p < p_old and D > clip_low

    `sg` stops the gradient. The clip widths bound D, which is in nats.
    """
    check_clip(clip_low, clip_high)
    p, old_p = _probability(x.logp, x), _probability(x.old_logp, x)
    # Rounding can make a log-probability slightly positive, and 1 - p must not become negative.
    rest, old_rest = (1 - p).clamp(min=0), (1 - old_p).clamp(min=0)
    kl = -old_p * log_ratio_of(x).detach() + old_rest * torch.log((old_rest + REST_FLOOR) / (rest + REST_FLOOR))
    keep = torch.where(
        masked(x.advantages, x.mask) > 0, (kl <= clip_high) | (p <= old_p), (kl <= clip_low) | (p >= old_p)
    )
    return _truncated(x, keep, ratio_cap)


def _probability(logp_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    return masked(logp_T.detach(), x.mask).exp()


def _truncated(x: LossInputs, keep_T: torch.Tensor, ratio_cap: float) -> LossResult:
    """Return the loss -A sg(min(r, ratio_cap)) logp where keep is True, and 0 where it is False."""
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap must be above 0, got {ratio_cap}")
    log_ratio = log_ratio_of(x).detach()
    ratio = exp_clamped(log_ratio)
    weight = torch.where(keep_T, ratio.clamp(max=ratio_cap), 0.0)
    loss = -masked(x.advantages, x.mask) * weight * masked(x.logp, x.mask)
    stats = ratio_stats(ratio, log_ratio, x) | {
        "clip_fraction": masked((~keep_T).to(ratio.dtype), x.mask),
        "cap_fraction": masked((keep_T & (ratio > ratio_cap)).to(ratio.dtype), x.mask),
    }
    return weighted(loss, x), stats
