"""Reduces per-token losses to a scalar, with weights that are known before the first micro-batch.

T: packed tokens of one micro-batch. A loss is `(loss_T * token_weights(...)).sum()`, summed over micro-batches and
ranks. The weights divide by global counts, so the sum does not depend on how the batch is split into micro-batches (law
2 of the design), as long as no sequence is split.

A sequence is one episode. A branching episode is also one sequence, in which a sampled token shared by several paths
counts only once.
"""

from dataclasses import dataclass

import torch

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Totals:
    """Counts over the whole batch: all micro-batches on all ranks."""

    tokens: float
    """Number of unmasked tokens."""
    sequences: float
    """Number of sequences with at least one unmasked token."""


def count_totals(mask_T: torch.Tensor, seq_T: torch.Tensor) -> Totals:
    """Return the counts of one micro-batch. The sums of these counts over micro-batches and ranks are the totals of the
    batch.

    mask_T: bool [T]. seq_T: int64 [T], sequence index of each token. Causes one device sync.
    """
    per_seq = sum_per_sequence(mask_T, seq_T)
    tokens, sequences = torch.stack([per_seq.sum(), (per_seq > 0).sum().double()]).tolist()
    return Totals(tokens, sequences)


def token_weights(
    mode: str,
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    totals: Totals,
    horizon: float | None = None,
    sequences: int | None = None,
) -> torch.Tensor:
    """Return the weight of each token's loss, fp64 [T]. Weights are exactly 0 where the mask is False.

    mode: what the weighted losses of the whole batch add up to:

    - `token-mean`: sum of all token losses / totals.tokens (DAPO, https://arxiv.org/abs/2503.14476)
    - `seq-mean-token-sum`: token losses summed within a sequence, mean over sequences
    - `seq-mean-token-mean`: token losses averaged within a sequence, mean over sequences (GRPO,
      https://arxiv.org/abs/2402.03300)
    - `seq-mean-token-sum-norm`: `seq-mean-token-sum` / horizon (Dr. GRPO, https://arxiv.org/abs/2503.20783)

    mask_T: bool [T], True where the loss counts. seq_T: int64 [T], sequence index of each token in this micro-batch.
    totals: counts over the whole batch. horizon: number of tokens, constant during the run, such as the maximum
    response length (verl uses the width of its padded mask). sequences: as in `sum_per_sequence`.

    The weights are fp64, so that a sum over many tokens, rounded to fp32, does not depend on their order. If a token is
    unmasked although the total that the mode divides by is 0, its weight is nan, which makes the mistake visible.
    Raises ValueError for an unknown mode, mismatched shapes, or a missing or non-positive horizon.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    if mask_T.ndim != 1 or mask_T.shape != seq_T.shape:
        raise ValueError(f"mask and seq must both be [T], got {tuple(mask_T.shape)} and {tuple(seq_T.shape)}")

    if mode == "token-mean":
        weight = torch.full(mask_T.shape, _inverse(totals.tokens), dtype=torch.float64, device=mask_T.device)
    else:
        weight = torch.full(mask_T.shape, _inverse(totals.sequences), dtype=torch.float64, device=mask_T.device)
    if mode == "seq-mean-token-mean":
        # A sequence is never split, so this micro-batch has all of its tokens. The count of unmasked tokens is 0 only
        # if the whole sequence is masked, and the sequence's weights are then set to 0 below.
        weight = weight / sum_per_sequence(mask_T, seq_T, sequences).clamp(min=1)[seq_T]
    if mode == "seq-mean-token-sum-norm":
        if horizon is None or not horizon > 0:
            raise ValueError(f"{mode} needs horizon > 0 tokens (e.g. the longest allowed response), got {horizon}")
        weight = weight / horizon
    return torch.where(mask_T.bool(), weight, 0.0)


def sum_per_sequence(value_T: torch.Tensor, seq_T: torch.Tensor, sequences: int | None = None) -> torch.Tensor:
    """Return the sum of the values of each sequence: [T] -> fp64 [B], differentiable with respect to the values.

    sequences: number of sequences, B. If None, B is the highest index in `seq_T` plus 1, and reading this index causes
    a device sync. The caller must set the values of masked tokens to 0 beforehand.
    """
    if sequences is None:
        sequences = int(seq_T.max()) + 1 if seq_T.numel() else 0
    sums = torch.zeros(sequences, dtype=torch.float64, device=value_T.device)
    return sums.index_add(0, seq_T, value_T.to(torch.float64))


def _inverse(total: float) -> float:
    return 1.0 / total if total > 0 else float("nan")
