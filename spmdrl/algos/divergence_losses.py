"""DPPO: policy losses whose trust region is a divergence of the two policies, not the ratio of one token.

Source: https://arxiv.org/abs/2602.04879. Both estimate the divergence from the sampled token against all the others
together ("binary"), and drop a token whose update would go further out of the region.
"""

import torch

from spmdrl.algos.loss_inputs import (
    LossInputs,
    LossResult,
    check_clip,
    exp_clamped,
    log_ratio_of,
    masked,
    ratio_stats,
    weighted,
)

REST_FLOOR = 1e-8
"""Added to the probability of all other tokens, 1 - p, before it is divided by: p may round to 1."""


def dppo_tv(x: LossInputs, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0) -> LossResult:
    """DPPO with total variation: a token is dropped where its probability has moved too far in the direction of its
    advantage.

    Source: https://arxiv.org/abs/2602.04879; threshold of its launch script
    (https://verl.readthedocs.io/en/latest/algo/dppo.html)

        loss = -A sg(min(r, ratio_cap)) logp
               0 where A > 0 and p - p_old > clip_high, or A <= 0 and p_old - p > clip_low

    The clip widths are differences of probability, in [0, 1]. Section 5.4 of the paper asks for a large `ratio_cap`.

    `ratio` is not capped; `clip_fraction` is the share of dropped tokens. Further stat: `cap_fraction`, kept tokens
    with a capped ratio.
    """
    check_clip(clip_low, clip_high, most_low=1.0)
    moved = _probability(x.logp, x) - _probability(x.old_logp, x)
    keep = torch.where(masked(x.advantages, x.mask) > 0, moved <= clip_high, moved >= -clip_low)
    return _truncated(x, keep, ratio_cap)


def dppo_kl(x: LossInputs, *, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0) -> LossResult:
    """DPPO with KL: as `dppo_tv`, with KL(old || current) of the sampled token against all others as the measure.

    Source: https://arxiv.org/abs/2602.04879; threshold of its launch script
    (https://verl.readthedocs.io/en/latest/algo/dppo.html)

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
        loss = as dppo_tv
               0 where A > 0, p > p_old and D > clip_high, or A <= 0, p < p_old and D > clip_low

    The clip widths are in nats.
    """
    check_clip(clip_low, clip_high)
    p, old_p = _probability(x.logp, x), _probability(x.old_logp, x)
    # A log-probability of 1e-7 above 0 is rounding; 1 - p must not turn negative for it.
    rest, old_rest = (1 - p).clamp(min=0), (1 - old_p).clamp(min=0)
    kl = -old_p * log_ratio_of(x).detach() + old_rest * torch.log((old_rest + REST_FLOOR) / (rest + REST_FLOOR))
    keep = torch.where(
        masked(x.advantages, x.mask) > 0, (kl <= clip_high) | (p <= old_p), (kl <= clip_low) | (p >= old_p)
    )
    return _truncated(x, keep, ratio_cap)


def _probability(logp_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    return masked(logp_T.detach(), x.mask).exp()


def _truncated(x: LossInputs, keep_T: torch.Tensor, ratio_cap: float) -> LossResult:
    """-A sg(min(r, ratio_cap)) logp where keep is True, else 0."""
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
