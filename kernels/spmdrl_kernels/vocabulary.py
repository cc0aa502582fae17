"""Describes a rank's part of the vocabulary, and sums results over the parts of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmdrl_kernels.deferred import check_later

MAX, SUM, SECOND, TARGET = range(4)
"""Indices of the rows of a state [4, T], which summarizes the columns processed so far. With logits y after softcap
and temperature, the rows are: the maximum m of y; the sum of e^(y-m); the sum of e^(y-m) (y-m) for the entropy, or of
e^(2(y-m)) for the collision probability; the y of the target."""
GATHERED = 4 * 2**20
"""Maximum number of elements that each rank sends in one all-gather."""


def lowest(dtype: torch.dtype) -> float:
    """Return the maximum with which a state starts, before its first column: half of the dtype's lowest number.

    Differences from it are finite, and their exp is 0. Differences from -inf could be nan.
    """
    return torch.finfo(dtype).min / 2


def clear_(state_4T: torch.Tensor) -> torch.Tensor:
    """Set a state [4, T] in place to the state before the first column; return it."""
    state_4T.zero_()[MAX] = lowest(state_4T.dtype)
    return state_4T


def new_state(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a state [4, tokens] for a part of the vocabulary with this number of columns.

    The values in the state are undefined until the operation on the first columns sets them. If there are no columns,
    the state is cleared.
    """
    state_4T = torch.empty(4, tokens, dtype=dtype, device=device)
    return state_4T if columns else clear_(state_4T)


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of a vocabulary of `total` tokens: [start, start + size), in the first rows of its weight."""

    start: int
    size: int
    total: int
    group: dist.ProcessGroup | None
    ordered: bool = False
    """True to sum in the order of ranks, for results that do not depend on other rows. With three or more ranks, the
    order in which an all-reduce sums depends on an element's position in the buffer."""
    excluded: tuple[int, ...] = ()
    """Ids that have probability 0."""

    @property
    def excluded_columns(self) -> tuple[int, ...]:
        """Columns of the excluded ids in this rank's part."""
        return tuple(token - self.start for token in self.excluded if 0 <= token - self.start < self.size)

    def at_excluded(self, values_T: torch.Tensor, targets_T: torch.Tensor, value: float) -> torch.Tensor:
        """Return the values [T], with `value` in the rows whose target is excluded."""
        for token in self.excluded:
            values_T = values_T.masked_fill(targets_T == token, value)
        return values_T

    def merge_(self, state_4T: torch.Tensor, second: str) -> None:
        """Merge the ranks' states into the state of the complete vocabulary, in place, by two collectives."""
        if self.group is None or not state_4T.shape[1]:
            return
        top_T = state_4T[MAX].clone()
        dist.all_reduce(top_T, dist.ReduceOp.MAX, group=self.group)
        rescale_(state_4T, top_T, second)
        self.sum_(state_4T[SUM:])

    def sum_(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks of the group, in place; return it. Collective."""
        if self.group is None or not value.numel():
            return value
        if not self.ordered:
            dist.all_reduce(value, group=self.group)
            return value
        for part in value.view(-1).split(GATHERED):
            parts = part.new_empty(dist.get_world_size(self.group) * len(part))
            dist.all_gather_into_tensor(parts, part, group=self.group)
            part.zero_()
            for other in parts.split(len(part)):
                part.add_(other)
        return value


def rescale_(state_4T: torch.Tensor, top_T: torch.Tensor, second: str) -> None:
    """Make the sums of a state relative to another maximum top_T, in place. second: as in `TorchRows.add_stats_`."""
    gap_T = state_4T[MAX] - top_T
    factor_T = gap_T.exp()
    if second == "entropy":
        state_4T[SECOND].addcmul_(gap_T, state_4T[SUM]).mul_(factor_T)
    elif second == "collision":
        state_4T[SECOND].mul_(factor_T.square())
    state_4T[SUM].mul_(factor_T)
    state_4T[MAX].copy_(top_T)


def _differing(facts: list[list[int]], sizes: Sequence[int]) -> str:
    """Return what is wrong with the ranks' numbers of rows, numbers of targets and sums of targets; "" if nothing is.

    sizes: the numbers of rows that the caller named.
    """
    rows, targets, sums = map(list, zip(*facts, strict=True))
    if len(set(targets)) > 1 or len(set(sums)) > 1:
        return f"ranks of one vocabulary group must pass the same tokens, got {targets} targets that sum to {sums}"
    return "" if rows == list(sizes) else f"ranks of the group have {rows} rows of the weight, not {list(sizes)}"


def open_vocabulary(
    rows: int,
    targets_T: torch.Tensor,
    valid_vocab: int | None,
    group: dist.ProcessGroup | None,
    ordered: bool = False,
    group_rows: Sequence[int] | None = None,
    excluded: Sequence[int] = (),
) -> Vocabulary:
    """Return this rank's part of the vocabulary, which is divided in the order of ranks. Collective.

    rows: number of rows in this rank's weight. ordered: see `Vocabulary`. group_rows: number of rows per rank; None to
    gather these numbers, which makes the host wait for the device. excluded: ids that have probability 0.

    Raises:
        ValueError: ranks of the group have different targets, their row counts differ from group_rows, valid_vocab does
            not fit, or no token is left. On a GPU, a later call raises the error about targets and rows if group_rows
            is given (`deferred.py`).
    """
    sizes, rank = [rows], 0
    if group is not None:
        rank = dist.get_rank(group)
        mine = torch.stack([targets_T.new_full((), x) for x in (rows, len(targets_T))] + [targets_T.sum()])
        facts = mine.new_empty(dist.get_world_size(group) * 3)
        dist.all_gather_into_tensor(facts, mine, group=group)
        facts, sizes = facts.view(-1, 3), group_rows
        if sizes is None:
            facts = facts.cpu()
            sizes = facts[:, 0].tolist()
        check_later(facts, lambda facts: _differing(facts, sizes))
    total, start = sum(sizes), sum(sizes[:rank])
    if valid_vocab is not None and not 1 <= valid_vocab <= total:
        raise ValueError(f"valid_vocab must lie in [1, {total}], the rows of the weight over all ranks: {valid_vocab}")
    valid = total if valid_vocab is None else valid_vocab
    return Vocabulary(
        start,
        min(max(valid - start, 0), rows),
        valid,
        group if len(sizes) > 1 else None,
        ordered and len(sizes) > 2,
        some_of(excluded, valid),
    )


def some_of(excluded: Sequence[int], vocab: int) -> tuple[int, ...]:
    """Return the excluded ids that are in a vocabulary of `vocab` tokens.

    Raises ValueError if an id is negative or no token is left.
    """
    if any(token < 0 for token in excluded):
        raise ValueError(f"excluded must be token ids, at least 0, got {list(excluded)}")
    inside = tuple(sorted({token for token in excluded if token < vocab}))
    if len(inside) >= vocab > 0:
        raise ValueError(f"excluded must leave a token of the vocabulary, but has all {vocab} ids")
    return inside
