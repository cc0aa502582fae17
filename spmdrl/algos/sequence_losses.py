"""Policy losses of whole sequences, in the form that `token_losses.py` describes.

Sums over a sequence run in fp64, as a response of thousands of tokens adds up thousands of rounding errors.
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
    sequence_mean,
    sequence_sum,
    sequence_weighted,
    weighted,
)


def gspo(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO: PPO's clip on the ratio of the whole sequence.

    Source: https://arxiv.org/abs/2507.18071

        s = exp(mean over the sequence of logp - old_logp)
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), a mean over sequences

    In the paper all tokens of a sequence have one advantage; the gradient is then that of `s`. With advantages that
    differ each token's gradient has its own, which is the paper's GSPO-token. A mean of log ratios moves far less than
    one ratio, so the clip is narrow.

    `ratio` is the sequence's.
    """
    return gspo_token(x, clip_low=clip_low, clip_high=clip_high)


def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO-token: the numbers of `gspo`, for advantages that differ within a sequence and for any aggregation.

    Source: https://arxiv.org/abs/2507.18071

    The ratio of a token is `sg(s) p / sg(p)`: the value of the sequence's ratio, the gradient of the token's own.
    """
    check_clip(clip_low, clip_high, most_low=1.0)
    advantages = masked(x.advantages, x.mask)
    log_ratio = log_ratio_of(x)
    logp = masked(x.logp, x.mask)
    ratio = exp_clamped(sequence_mean(log_ratio.detach(), x) + (logp - logp.detach())).to(logp.dtype)
    unclipped, clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    stats = ratio_stats(ratio, log_ratio, x) | {"clip_fraction": (clipped > unclipped).to(ratio.dtype)}
    return weighted(torch.maximum(unclipped, clipped), x), stats


def gmpo(x: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossResult:
    """GMPO: the geometric mean of the tokens' clipped ratios, where GRPO takes the arithmetic mean.

    Source: https://arxiv.org/abs/2507.20673

        loss = -A exp(mean over the sequence of the clipped log ratios), a mean over sequences
        log r is at most clip_high where A > 0, at least -clip_low where A < 0, and counts as 0 where A = 0

    `A` in the loss is the mean advantage of the sequence, in the clip the token's. The clip widths are in log space.
    Importance weights multiply by their geometric mean, so a token whose weight is 0 takes its whole sequence out.

    `ratio` is the sequence's geometric mean after clipping.
    """
    check_clip(clip_low, clip_high)
    advantages = masked(x.advantages, x.mask)
    log_ratio = log_ratio_of(x)
    towards = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    clipped = torch.where(advantages == 0, 0.0, towards)
    ratio = exp_clamped(sequence_mean(clipped, x))
    loss = masked(-sequence_mean(advantages, x) * ratio, x.mask)
    was_clipped = ((towards != log_ratio) & (advantages != 0)).to(log_ratio.dtype)
    return sequence_weighted(loss, x).to(log_ratio.dtype), ratio_stats(ratio, log_ratio, x) | {
        "clip_fraction": was_clipped
    }


def sppo(x: LossInputs, *, eta: float = 1.0) -> LossResult:
    """SPPO: a regression of the sequence's log ratio on how much it is preferred.

    Source: https://arxiv.org/abs/2405.00675

        loss = (sum over the sequence of (logp - old_logp) - eta A)^2, a mean over sequences

    `A` is the mean advantage of the sequence and should be P(it beats the current policy) - 1/2, as of the advantage
    `win_rate`. The default of `eta` is for rewards on the scale of a log ratio, as in
    https://verl.readthedocs.io/en/latest/algo/sppo.html; the paper has 1000. The first optimizer step of a step has a
    log ratio of 0, so `eta` alone sets the size of its gradient. Importance weights multiply by their geometric mean
    over the sequence.

    Stats: `old_kl`; `sequence_log_ratio`, the sum; `sequence_error`, the sum less its target.
    """
    if not eta > 0:
        raise ValueError(f"eta must be above 0, got {eta}")
    log_ratio = log_ratio_of(x)
    total = sequence_sum(log_ratio, x)
    error = total - eta * sequence_mean(x.advantages, x)
    stats = {
        "old_kl": -log_ratio.detach(),
        "sequence_log_ratio": total.detach().to(log_ratio.dtype),
        "sequence_error": error.detach().to(log_ratio.dtype),
    }
    return sequence_weighted(error.square(), x).to(log_ratio.dtype), stats
