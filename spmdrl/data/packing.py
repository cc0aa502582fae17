"""Micro-batches: sequences packed up to a token budget, equal in number on every rank."""

import torch

from spmdrl.data.batch import Batch
from spmdrl.spmd.balance import karmarkar_karp


def microbatch_count(lengths_B: torch.Tensor, budget: int) -> int:
    """Fewest micro-batches that first-fit-decreasing needs for these sequences; 0 for none.

    Raises:
        ValueError: one sequence alone is longer than the budget.
    """
    return len(first_fit_decreasing(lengths_B.tolist(), budget))


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of sequences in bins of at most `budget` tokens; within 22% of optimal, in practice near 1%."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        if size > budget:
            raise ValueError(
                f"a sequence of {size} tokens is longer than --policy.max_tokens_per_microbatch {budget}; "
                f"set it to at least {size}"
            )
        slot = next((b for b, free in enumerate(room) if free >= size), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= size
    return bins


def microbatches(batch: Batch, count: int, budget: int) -> list[Batch]:
    """Split a batch into exactly `count` micro-batches of at most `budget` tokens; some may be empty.

    `count` is the largest `microbatch_count` over all ranks, so that every rank runs as many forwards (law 1).
    """
    lengths = batch.lengths.tolist()
    parts = karmarkar_karp(lengths, count) if count else []
    if any(sum(lengths[i] for i in part) > budget for part in parts):
        # An even split may overflow a tight budget where first-fit does not.
        parts = first_fit_decreasing(lengths, budget)
        parts += [[] for _ in range(count - len(parts))]
    return [batch.select(torch.tensor(sorted(part), dtype=torch.int64)) for part in parts]
