"""KL-Cov and Clip-Cov: losses that restrict the update on the few tokens that cause entropy collapse.

Source: https://arxiv.org/abs/2505.22617. These tokens have a log-probability and an advantage that are both far from
their means, in the same direction. The tokens are selected from the whole batch (all micro-batches on all ranks) before
the loss is computed, and passed to it as `x.selected`. Selecting within each micro-batch would make the result depend
on how the batch is split, which law 2 of the design forbids.

A selection function is `f(x: Selecting, **settings) -> bool [T]`, with the same settings as its loss. Whatever the
data, a selection function gathers from other ranks exactly twice (law 1 of the design): first per-sequence sums, then
each rank's best candidates. The result is bitwise identical for any distribution of sequences over ranks, because terms
are added in ascending order and ties are broken by sample and then by token.

T: packed tokens (of one micro-batch in a loss, of the whole rank in a selection); B: sequences of this rank; N: rows of
all ranks.
"""

from dataclasses import dataclass

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
from spmdrl.algos.samples import Gather, Samples, alone


def kl_cov(x: LossInputs, *, cov_ratio: float = 2e-4, kl_coef: float = 1.0) -> LossResult:
    """KL-Cov: a KL penalty on the few tokens that cause entropy collapse.

    Source: https://arxiv.org/abs/2505.22617; defaults of https://github.com/PRIME-RL/Entropy-Mechanism-of-RL

        covariance of a token = (A - mean A) (logp - mean logp), means over the optimizer step's tokens on all ranks
        loss = -A r + kl_coef |logp - old_logp| at the selected tokens; -A r elsewhere

    The tokens with the largest covariance are selected: a fraction `cov_ratio` of all tokens, and at least one unless
    `cov_ratio` is 0.

    Also reports `selected_fraction`.
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
    """Clip-Cov: PPO's clipped loss, set to 0 for a random subset of the tokens that cause entropy collapse.

    Source: https://arxiv.org/abs/2505.22617; defaults of https://github.com/PRIME-RL/Entropy-Mechanism-of-RL

        loss = PPO's; 0 at the selected tokens

    The selected tokens are drawn from the tokens with `cov_low < covariance < cov_high` that PPO does not clip. Their
    number is the fraction `cov_ratio` of all tokens (at least one, unless `cov_ratio` is 0), or the number of
    candidates if that is smaller. See `kl_cov` for the covariance. Whether a token is drawn does not depend on which
    rank holds it.

    Also reports `selected_fraction`. `clip_fraction` is the fraction of tokens whose PPO loss is decided by the clip.
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
    """Raise ValueError unless `cov_ratio` is in [0, 1]."""
    if not 0 <= cov_ratio <= 1:
        raise ValueError(f"cov_ratio is a share of all tokens, in [0, 1], got {cov_ratio}")


def _selected(x: LossInputs, name: str) -> torch.Tensor:
    if x.selected is None:
        raise ValueError(
            f"{name} needs `selected`: its tokens are selected over the whole batch before the loss, by select_{name} "
            "of spmdrl.algos.covariance_losses"
        )
    return x.selected & x.mask


# ── selection ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Selecting:
    """Inputs to a selection function: this rank's tokens in one optimizer step. Tensors are on the CPU.

    Floats are fp64 and may have any value where the mask is False. `seq` is in ascending order.
    """

    logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    """The fields `logp` to `seq` have shape [T], as in `LossInputs`."""
    sequences: int
    """Number of sequences, B."""
    draw: torch.Tensor | None = None
    """[T]: one uniform random number in [0, 1) per token, independent of which rank holds the token. Required by
    clip_cov. None for kl_cov."""
    gather: Gather = alone
    """Function that gathers rows from all ranks, as in `Samples`."""


def select_kl_cov(x: Selecting, *, cov_ratio: float = 2e-4, kl_coef: float = 1.0) -> torch.Tensor:
    """Return bool [T], True at the max(1, int(cov_ratio * tokens)) tokens with the largest covariance across all ranks.

    Source: https://arxiv.org/abs/2505.22617

    The covariance of a token is (A - mean A)(logp - mean logp), means over all unmasked tokens of all ranks. cov_ratio:
    in [0, 1], where 0 selects no token. kl_coef: unused, but accepted because the loss takes it. Collective in a run.
    """
    check_share(cov_ratio)
    cov_T, place_B, most = _covariance(x, cov_ratio)
    return _best(x, x.mask, cov_T, place_B, most)


def select_clip_cov(
    x: Selecting,
    *,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Return bool [T], True at random tokens with cov_low < covariance < cov_high that PPO does not clip.

    Source: https://arxiv.org/abs/2505.22617

    Selects the max(1, int(cov_ratio * tokens)) candidates with the lowest `draw` across all ranks, or all candidates if
    there are fewer. cov_ratio: in [0, 1], where 0 selects no token. Collective in a run. Raises ValueError if `draw` is
    missing or a setting is out of range.
    """
    check_share(cov_ratio)
    check_clip(clip_low, clip_high, most_low=1.0)
    if not cov_low < cov_high:
        raise ValueError(f"cov_low must be below cov_high, got {cov_low} and {cov_high}")
    if x.draw is None:
        raise ValueError("clip_cov chooses at random: give `draw`, a uniform number for each token")
    cov_T, place_B, most = _covariance(x, cov_ratio)
    ratio_T = exp_clamped(x.logp - x.old_logp)
    unclipped_T, clipped_T = clipped_surrogate(x.advantages, ratio_T, clip_low, clip_high)
    candidates = x.mask & (cov_T > cov_low) & (cov_T < cov_high) & ~(clipped_T > unclipped_T)
    return _best(x, candidates, -x.draw, place_B, most)


def _rows(x: Selecting) -> Samples:
    return Samples(torch.zeros(len(x.mask)), x.mask, x.seq, torch.arange(x.sequences), gather=x.gather)


def _covariance(x: Selecting, cov_ratio: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the covariance [T], each sequence's index over all ranks [B], and the number of tokens to select."""
    rows = _rows(x)
    columns = (rows.lengths, rows.sum_tokens(x.advantages), rows.sum_tokens(x.logp))
    count_N, advantage_N, logp_N, place_B = rows.everyone(*columns)
    tokens = int(count_N.sum())
    mean_advantage, mean_logp = (sum_N.sort().values.sum() / max(tokens, 1) for sum_N in (advantage_N, logp_N))
    most = min(max(1, int(cov_ratio * tokens)), tokens) if cov_ratio else 0
    return (x.advantages - mean_advantage) * (x.logp - mean_logp), place_B, most


def _best(
    x: Selecting, candidates_T: torch.Tensor, value_T: torch.Tensor, place_B: torch.Tensor, most: int
) -> torch.Tensor:
    """Return bool [T]: True at the `most` candidates with the largest values across all ranks."""
    index = torch.nonzero(candidates_T).flatten()
    # Sort by value, with ties in sample order. A candidate outside this rank's top `most` cannot be in the global top
    # `most`, so `most` candidates per rank are enough.
    index = index[torch.argsort(place_B[x.seq[index]], stable=True)]
    index = index[torch.argsort(value_T[index], descending=True, stable=True)][:most].sort().values
    value_N, place_n = _rows(x).everyone(value_T[index], seq_n=x.seq[index])
    chosen_N = torch.zeros(len(value_N), dtype=torch.bool)
    chosen_N[torch.argsort(value_N, descending=True, stable=True)[:most]] = True
    selected_T = torch.zeros(len(candidates_T), dtype=torch.bool)
    selected_T[index] = chosen_N[place_n]
    return selected_T
