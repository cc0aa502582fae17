"""Rollout correction: importance weights for tokens whose log-probability differs between engine and trainer.

T: packed tokens; B: sequences. The token-level ratio is r = exp(old_logp - rollout_logp). The sequence-level ratio is
the product of the ratios of all unmasked tokens. Token-level and sequence-level log ratios are clamped to +-20 before
exp. Results have no gradient. Masked tokens have weight 0 and are excluded from all statistics, whatever their input
values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algos.aggregate import sum_per_sequence
from spmdrl.algos.loss_inputs import LOG_RATIO_LIMIT, exp_clamped, masked
from spmdrl.algos.rows import as_tensor, find, settings_of, unpad


def uncorrected(ratio: torch.Tensor) -> torch.Tensor:
    """1 for every token: no correction."""
    return torch.ones_like(ratio)


def tis(ratio: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    """`min(r, high)`: truncated importance sampling.

    Source: https://fengyao.notion.site/off-policy-rl
    """
    return ratio.clamp(max=high)


def icepop(ratio: torch.Tensor, *, low: float = 0.5, high: float = 5.0) -> torch.Tensor:
    """`r` where `low <= r <= high`, else 0: IcePop.

    Source: https://arxiv.org/abs/2510.18855
    """
    return torch.where(_within(ratio, low, high), ratio, 0.0)


def mis(ratio: torch.Tensor, *, low: float | None = None, high: float = 2.0) -> torch.Tensor:
    """`r` where `low <= r <= high`, else 0: masked importance sampling.

    Source: https://richardli.xyz/rl-collapse

    `high` has the same default as in `tis`.
    """
    return torch.where(_within(ratio, low, high), ratio, 0.0)


@dataclass(frozen=True)
class Correction:
    """A type of importance weight: a function of the ratio, with its bounds as keyword-only parameters."""

    function: Callable[..., torch.Tensor]
    of_sequence: bool = False
    """Whether every token uses the ratio of its whole sequence instead of its own."""


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(uncorrected),
    "tis_token": Correction(tis),
    "tis_sequence": Correction(tis, of_sequence=True),
    "icepop": Correction(icepop),
    "mis_token": Correction(mis),
    "mis_sequence": Correction(mis, of_sequence=True),
}


def correction_weights(
    kind: str,
    old_logp: Any,
    rollout_logp: Any,
    mask: Any,
    seq_T: torch.Tensor | None = None,
    low: float | None = None,
    high: float | None = None,
    sequences: int | None = None,
) -> torch.Tensor:
    """Return the importance weight of each token, with the shape, dtype and device of old_logp, and 0 where the mask is
    False.

    Args:
        kind: a key of CORRECTIONS.
        old_logp: the trainer's log-probabilities, packed [T] or padded [B, T], nats.
        rollout_logp: the log-probabilities that the engine reported, in the same shape.
        mask: True where the policy sampled: bool [T] for packed inputs, or bools or 0/1 [B, T] for padded inputs.
        seq_T: int64 [T], sequence index of each token, or None for padded inputs, where each row is a sequence.
        low: lower bound. Smaller ratios become 0. None uses the default of `kind`.
        high: upper bound. Larger ratios become `high` (tis) or 0 (icepop, mis). None uses the default of `kind`.
        sequences: number of sequences, as in `aggregate.sum_per_sequence`.

    Raises:
        ValueError: an unknown `kind`; a `low` that is negative or above `high`; a non-positive `high`; a `low` for a
            kind that only truncates from above; mismatched shapes.
    """
    row = find(kind, CORRECTIONS, "rollout correction")
    if seq_T is None:
        mask_T, seq_T, shape = unpad(mask)
        old, rollout = as_tensor("old_logp", old_logp, shape), as_tensor("rollout_logp", rollout_logp, shape)
        old = (old if old.is_floating_point() else old.double()).flatten()
        rows = (old, rollout.flatten().to(old), mask_T.to(old.device), seq_T.to(old.device))
        return correction_weights(kind, *rows, low, high).view(shape)
    bounds = settings_of(row.function)
    if kind.startswith("tis") and low is not None:
        raise ValueError(
            f"{kind} truncates from above only: leave out low ({low}), or take icepop or {'mis' + kind[3:]}"
        )
    bounds |= {name: bound for name, bound in (("low", low), ("high", high)) if name in bounds and bound is not None}
    _check_bounds(bounds.get("low"), bounds.get("high"))
    log_ratio_T = _log_ratio(old_logp, rollout_logp, mask)
    if row.of_sequence:
        log_ratio_T = sum_per_sequence(log_ratio_T, seq_T, sequences)[seq_T]
    return masked(row.function(exp_clamped(log_ratio_T), **bounds), mask).to(old_logp.dtype)


def reject_sequences(
    old_logp_T: torch.Tensor,
    rollout_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    low: float | None,
    high: float | None,
    sequences: int | None = None,
) -> torch.Tensor:
    """Return bool [B], True for sequences whose geometric-mean token ratio lies in [low, high].

    Source: https://richardli.xyz/rl-collapse. Typical bounds are close to 1, such as 0.99 and 1.001.

    The geometric mean of the token ratios, unlike their product, does not grow or shrink with the sequence length. A
    fully masked sequence has ratio 1. low, high: None means no bound. sequences: number of sequences, as in
    `aggregate.sum_per_sequence`.
    """
    _check_bounds(low, high)
    total_B = sum_per_sequence(_log_ratio(old_logp_T, rollout_logp_T, mask_T), seq_T, sequences)
    return _within(exp_clamped(total_B / sum_per_sequence(mask_T, seq_T, sequences).clamp(min=1)), low, high)


def mismatch(
    old_logp_T: torch.Tensor,
    rollout_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    sequences: int | None = None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return metrics of the mismatch between old_logp and the engine's logp: name -> (mean, weight), 0-d fp64.

    `sum(mean * weight) / sum(weight)` over micro-batches and ranks is the batch mean. `finish_monitors` derives other
    metrics from the batch means. Means over tokens:

    - `mismatch/k1`, `mismatch/k3`: estimates of KL(rollout || old), log(1 / r) and r - 1 - log r
    - `mismatch/ratio`, `mismatch/ratio_square`: r and r^2

    `mismatch/sequence_ratio` and `mismatch/sequence_ratio_square` are means over sequences with at least one unmasked
    token.

    sequences: number of sequences, as in `aggregate.sum_per_sequence`.
    """
    log_ratio_T = _log_ratio(old_logp_T, rollout_logp_T, mask_T)
    count_B = sum_per_sequence(mask_T, seq_T, sequences)
    ratio_T, ratio_B = exp_clamped(log_ratio_T), exp_clamped(sum_per_sequence(log_ratio_T, seq_T, sequences))
    tokens, trained = count_B.sum(), (count_B > 0).sum().double()
    of_tokens = {
        "k1": -log_ratio_T,
        "k3": torch.expm1(log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - log_ratio_T,
        "ratio": ratio_T,
        "ratio_square": ratio_T.square(),
    }
    of_sequences = {"sequence_ratio": ratio_B, "sequence_ratio_square": ratio_B.square()}
    means = {name: (masked(x_T, mask_T).sum() / tokens.clamp(min=1), tokens) for name, x_T in of_tokens.items()}
    means |= {
        name: (masked(x_B, count_B > 0).sum() / trained.clamp(min=1), trained) for name, x_B in of_sequences.items()
    }
    return {f"mismatch/{name}": value for name, value in means.items()}


def disagreement(
    logp_T: torch.Tensor, rollout_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean of |logp - rollout_logp| in nats, its weight (number of tokens), and the maximum: 0-d fp64.

    If no token is unmasked, the three values are 0, 0 and -inf. See `mismatch` for how to reduce the mean over
    micro-batches and ranks.
    """
    difference_T, tokens = _log_ratio(logp_T, rollout_logp_T, mask_T).abs(), mask_T.sum().double()
    largest = torch.where(mask_T, difference_T, -torch.inf).amax() if len(mask_T) else tokens - torch.inf
    return difference_T.sum() / tokens.clamp(min=1), tokens, largest


def finish_monitors(values: dict[str, float]) -> dict[str, float]:
    """Return a step's mismatch metrics, with the means of r and r^2 replaced by chi2 and ess.

    `mismatch/chi2` = E[r^2] - 1 is the chi-square divergence of old from rollout. `mismatch/ess` = E[r]^2 / E[r^2] is
    the effective sample size as a fraction of the samples, in (0, 1]. Both metrics use token-level ratios.
    `mismatch/sequence_chi2` and `mismatch/sequence_ess` use sequence-level ratios.
    """
    done = dict(values)
    for level in ("", "sequence_"):
        mean = done.pop(f"mismatch/{level}ratio", None)
        square = done.pop(f"mismatch/{level}ratio_square", None)
        if mean is not None and square is not None:
            done[f"mismatch/{level}chi2"] = square - 1
            done[f"mismatch/{level}ess"] = mean**2 / square
    return done


def _log_ratio(old_logp_T: torch.Tensor, rollout_logp_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return old_logp - rollout_logp in fp64, 0 where the mask is False."""
    return masked(old_logp_T.detach().double(), mask_T) - masked(rollout_logp_T.detach().double(), mask_T)


def _within(ratio: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    return (ratio >= (0.0 if low is None else low)) & (ratio <= (float("inf") if high is None else high))


def _check_bounds(low: float | None, high: float | None) -> None:
    if (low is not None and not low >= 0) or (high is not None and not high > 0):
        raise ValueError(f"the bounds of a ratio must be low >= 0 and high > 0, got low {low} and high {high}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low must not be above high, got {low} and {high}")
