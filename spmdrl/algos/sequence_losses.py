"""Sequence-level policy losses. See the docstring of `token_losses.py` for inputs and outputs.

Sums over a sequence are computed in fp64, because the rounding errors of thousands of tokens add up.
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
    """GSPO: PPO's clip applied to the sequence-level ratio.

    Source: https://arxiv.org/abs/2507.18071

        s = exp(mean over the sequence of logp - old_logp)
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), averaged over sequences

    In the paper, all tokens of a sequence share one advantage, and the gradient is the gradient of `s`. If the
    advantages differ within a sequence, each token's gradient uses its own advantage, as in the paper's GSPO-token. The
    clip range is narrow, because a mean of log ratios varies far less than the ratio of a single token.

    The stat `ratio` is the sequence-level importance ratio.
    """
    return gspo_token(x, clip_low=clip_low, clip_high=clip_high)


def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO-token: like `gspo`, but for advantages that differ within a sequence and for any aggregation.

    Source: https://arxiv.org/abs/2507.18071

    The ratio of a token is `sg(s) p / sg(p)`, where `sg` stops the gradient and `p` is the probability of the token.
    Its value is the sequence-level ratio `s`, but its gradient depends only on this token.
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
    """GMPO: the geometric mean of the clipped token ratios instead of GRPO's arithmetic mean.

    Source: https://arxiv.org/abs/2507.20673

        loss = -A exp(mean over the sequence of the clipped log ratios), averaged over sequences
        log r is at most clip_high where A > 0, at least -clip_low where A < 0, and counts as 0 where A = 0

    In the loss, `A` is the sequence's mean advantage, but in the clip, `A` is the token's advantage. The clip widths
    bound log ratios, not ratios. The loss is multiplied by the geometric mean of the importance weights, so a single
    token with weight 0 removes the whole sequence.

    The stat `ratio` is the geometric mean of the sequence's clipped token ratios.
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
    """SPPO: a squared error that pulls the log ratio of a sequence towards `eta (win rate - 1/2)`.

    Source: https://arxiv.org/abs/2405.00675

        loss = (sum over the sequence of (logp - old_logp) - eta A)^2, averaged over sequences

    `A` is the sequence's mean advantage. This advantage should be the probability that the response beats the current
    policy, minus 1/2, which is the quantity that the advantage estimator `win_rate` estimates. The default `eta` is
    meant for rewards on the scale of a log ratio, as in https://verl.readthedocs.io/en/latest/algo/sppo.html. The paper
    uses 1000. In the first optimizer step on a batch, the log ratio is 0, so the gradient is proportional to `eta`. The
    loss is multiplied by the geometric mean of the sequence's importance weights.

    Stats: `old_kl`; `sequence_log_ratio`, the sum of the log ratios; `sequence_error`, that sum minus `eta A`.
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
