"""KL-Cov and Clip-Cov: losses that hold back the few tokens which collapse the policy's entropy.

Source: https://arxiv.org/abs/2505.22617. Those are tokens whose log-probability and advantage are far above their means
together. Which ones is a property of the whole batch, so it is settled beforehand (`selection.py`) and given in
`x.selected`; deciding per micro-batch would make the result depend on how the batch was cut (law 2 of the design).
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


def kl_cov(x: LossInputs, *, cov_ratio: float = 2e-4, kl_coef: float = 1.0) -> LossResult:
    """KL-Cov: a penalty at the few tokens that collapse the entropy.

    Source: https://arxiv.org/abs/2505.22617; defaults of https://github.com/PRIME-RL/Entropy-Mechanism-of-RL

        covariance of a token = (A - mean A) (logp - mean logp), means over the tokens of the optimizer step, all ranks
        loss = -A r + kl_coef |logp - old_logp| at the cov_ratio of tokens with the largest covariance; -A r elsewhere

    At least one token is selected.

    Further stat: `selected_fraction`.
    """
    selected = _selected(x, "kl_cov")
    check_share(cov_ratio)
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}")
    log_ratio = log_ratio_of(x)
    ratio = exp_clamped(log_ratio)
    loss = -masked(x.advantages, x.mask) * ratio + kl_coef * torch.where(selected, log_ratio.abs(), 0.0)
    return weighted(loss, x), ratio_stats(ratio, log_ratio, x) | {"selected_fraction": selected.to(ratio.dtype)}


def clip_cov(
    x: LossInputs,
    *,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossResult:
    """Clip-Cov: PPO's clipped loss, and 0 at a random choice of the tokens that collapse the entropy.

    Source: https://arxiv.org/abs/2505.22617; defaults of https://github.com/PRIME-RL/Entropy-Mechanism-of-RL

        loss = PPO's; 0 at cov_ratio of the tokens, drawn from those with cov_low < covariance < cov_high
               that PPO did not clip

    The covariance is that of `kl_cov`. The draw is keyed by the sample and the token's place, not by the rank.

    Further stat: `selected_fraction`. `clip_fraction` is the share of tokens where PPO's clip decided.
    """
    selected = _selected(x, "clip_cov")
    check_share(cov_ratio)
    check_clip(clip_low, clip_high, most_low=1.0)
    log_ratio = log_ratio_of(x)
    ratio = exp_clamped(log_ratio)
    unclipped, clipped = clipped_surrogate(masked(x.advantages, x.mask), ratio, clip_low, clip_high)
    stats = ratio_stats(ratio, log_ratio, x) | {
        "clip_fraction": (clipped > unclipped).to(ratio.dtype),
        "selected_fraction": selected.to(ratio.dtype),
    }
    return weighted(torch.where(selected, 0.0, torch.maximum(unclipped, clipped)), x), stats


def check_share(cov_ratio: float) -> None:
    """ValueError where the share of tokens is not in [0, 1]."""
    if not 0 <= cov_ratio <= 1:
        raise ValueError(f"cov_ratio is a share of all tokens, in [0, 1], got {cov_ratio}")


def _selected(x: LossInputs, name: str) -> torch.Tensor:
    if x.selected is None:
        raise ValueError(
            f"{name} needs `selected`: which tokens it holds back is chosen over the whole batch first, by "
            f"select_{name} of spmdrl.algos.selection"
        )
    return x.selected & x.mask
