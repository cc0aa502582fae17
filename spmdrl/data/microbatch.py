"""Packs sequences into micro-batches up to a token budget. All ranks run the same number of micro-batches."""

from dataclasses import dataclass

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import COLUMN
from spmdrl.data.tree import Shared, prompt_lengths, shared_tokens
from spmdrl.spmd.balance import karmarkar_karp, largest


@dataclass
class Unit:
    """Sequences that must share a micro-batch, and the number of tokens computed for them."""

    members: list[int]
    tokens: int


def units_of(batch: Batch, budget: int, share: bool) -> list[Unit]:
    """Split a batch into units: single episodes, or with `share` as many samples of a prompt as fit into the budget.

    All paths of an episode are in one unit; with `share`, their common tokens are computed once. If the batch has the
    column `seq["unit"]`, adjacent sequences with the same value, such as the two of a pair, are always in one unit.
    """
    lengths = batch.lengths.tolist()
    if len(batch) < 2 or not (share or "unit" in batch.seq or batch.branches):
        return [Unit([i], n) for i, n in enumerate(lengths)]
    shared = _shared(batch).tokens if share else [0] * len(batch)
    together = batch.seq.get("unit", batch.episode).tolist()
    starts = [i for i in range(len(batch)) if i == 0 or together[i] != together[i - 1]]
    units: list[Unit] = []
    for start, end in zip(starts, [*starts[1:], len(batch)], strict=True):
        alone = lengths[start] + sum(lengths[i] - shared[i] for i in range(start + 1, end))
        joined = alone - shared[start]
        if shared[start] and units[-1].tokens + joined <= budget:
            units[-1].members += range(start, end)
            units[-1].tokens += joined
        else:
            units.append(Unit(list(range(start, end)), alone))
    return units


def _shared(batch: Batch) -> Shared:
    token = batch.token
    columns = token.get("experts"), token.get(COLUMN)
    return shared_tokens(token["tokens"], batch.lengths, token["mask"], batch.begins, *columns)


def work_of(batch: Batch, share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate each sequence's work in tokens: its total work, and the part that its prompt's samples share.

    Both are int64 [B]. share: True if shared tokens are computed once; a later path of an episode then counts only the
    tokens that it adds, and shares 0. If False, all sequences share 0.
    """
    if not share:
        return batch.lengths, torch.zeros_like(batch.lengths)
    work = batch.lengths
    if batch.branches:
        work = torch.where(batch.begins, work, work - torch.tensor(_shared(batch).tokens, dtype=torch.int64))
    common = torch.minimum(prompt_lengths(batch.lengths, batch.token["mask"]), work - 1)
    return work, torch.where(batch.begins, common, 0)


def microbatch_count(lengths_B: torch.Tensor, budget: int) -> int:
    """Return the number of micro-batches into which `fewest` packs these sequences, or 0 if there are none.

    Raises ValueError if one sequence alone is longer than the budget.
    """
    return len(fewest(lengths_B.tolist(), budget))


def fewest(lengths: list[int], budget: int) -> list[list[int]]:
    """Assign sequences to bins of at most `budget` tokens, using whichever of two methods needs fewer bins.

    An even split often reaches the lower bound on the number of bins, while first-fit leaves a gap in each bin. With
    GSM8K row lengths and four rows per bin, an even split needs 1.004 times the lower bound, and first-fit 1.04 times.
    Raises ValueError if one sequence alone is longer than the budget.
    """
    parts = first_fit_decreasing(lengths, budget)
    least = max(1, -(-sum(lengths) // budget))
    for count in range(least, min(least + 2, len(parts))):
        even = karmarkar_karp(lengths, count)
        if largest(even, lengths) <= budget:
            return even
    return parts


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """Assign sequences to bins of at most `budget` tokens, using at most 22% more bins than optimal, usually about 1%.

    Raises ValueError if one sequence alone is longer than the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        if size > budget:
            raise ValueError(
                f"a sequence of {size} tokens is longer than --policy.max-tokens-per-microbatch {budget}; "
                f"set it to at least {size} (an episode that branches counts with all its paths)"
            )
        slot = next((b for b, free in enumerate(room) if free >= size), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= size
    return bins


def microbatches(batch: Batch, count: int, budget: int, units: list[Unit] | None = None) -> list[Batch]:
    """Split a batch into exactly `count` micro-batches of at most `budget` tokens; some may be empty.

    units: sequences that must stay together, from `units_of`, or None to place each sequence separately. `count` is the
    maximum `microbatch_count` over all ranks, so that every rank runs the same number of forward passes (law 1).
    """
    units = units_of(batch, budget, share=False) if units is None else units
    lengths = [unit.tokens for unit in units]
    parts = karmarkar_karp(lengths, count) if count else []
    if largest(parts, lengths) > budget:
        # An even split can exceed a tight budget even if a split into fewer parts, or first-fit, does not.
        parts = fewest(lengths, budget)
        parts += [[] for _ in range(count - len(parts))]
    members = [sorted(i for u in part for i in units[u].members) for part in parts]
    micros = [batch.select(torch.tensor(part, dtype=torch.int64)) for part in members]
    for micro, part in zip(micros, members, strict=True):
        micro.plans = batch.plans.setdefault(tuple(part), micro.plans)
    return micros
