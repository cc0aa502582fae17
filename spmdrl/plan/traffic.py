"""Bytes that a rank sends in collectives, by the axis of their group and the kind of collective.

A collective of n ranks is counted as a ring would carry it: each rank sends (n - 1) / n of an all-gather's result, of a
reduce-scatter's input and of an all-to-all, and twice that of an all-reduce; a broadcast passes once through each rank.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
"""Beginnings of the names of torch's operations, the longest first where one begins another."""


@dataclass
class Traffic:
    """Bytes and calls of the collectives of one rank."""

    bytes: Counter = field(default_factory=Counter)
    """(axis, kind) -> bytes."""
    calls: Counter = field(default_factory=Counter)
    """(axis, kind) -> collectives, or messages."""
    axes: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Ranks of a group -> name of its axis."""

    def copy(self) -> "Traffic":
        """Return the counts of this moment."""
        return Traffic(Counter(self.bytes), Counter(self.calls), self.axes)

    def since(self, before: "Traffic") -> "Traffic":
        """Return what came after an earlier `copy`."""
        return Traffic(_less(self.bytes, before.bytes), _less(self.calls, before.calls), self.axes)

    def name(self, group: Any, ranks: tuple[int, ...] | None = None) -> str:
        """Give a group the name of an axis if it has none. Returns its name."""
        ranks = ranks or tuple(dist.get_process_group_ranks(group))
        return self.axes.get(ranks, f"{len(ranks)} ranks")

    def note(self, func: Any, args: tuple) -> None:
        """Count one operation of torch's namespace c10d."""
        word = func.overloadpacket.__name__.strip("_")
        kind = next((kind for begin, kind in KINDS.items() if word.startswith(begin)), word)
        group = next((g for g in map(_group, args) if g is not None), None)
        if group is not None and group.size() > 1:
            self.add(kind, group, sent(kind, group.size(), group.rank(), args))

    def add(self, kind: str, group: Any, size: int) -> None:
        """Count one collective, or one message, of `size` bytes."""
        key = self.name(group), kind
        self.calls[key] += 1
        self.bytes[key] += size


def sent(kind: str, n: int, rank: int, args: tuple) -> int:
    """Return the bytes that one of n ranks sends in a collective, carried as by a ring."""
    sizes = [_nbytes(x) for x in args[:2]]
    if kind in ("all-gather", "reduce-scatter"):
        return max(sizes) * (n - 1) // n
    if kind == "all-reduce":
        return 2 * sizes[0] * (n - 1) // n
    if kind == "all-to-all":
        return max(sizes) * (n - 1) // n
    if kind in ("send", "broadcast", "reduce", "gather", "scatter"):
        return sizes[0]
    return 0


def _nbytes(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    return sum(_nbytes(y) for y in x) if isinstance(x, (list, tuple)) else 0


def _group(x: Any) -> Any:
    if isinstance(x, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(x)
        except (RuntimeError, TypeError):
            return None
    return x if isinstance(x, dist.ProcessGroup) else None


def _less(a: Counter, b: Counter) -> Counter:
    return Counter({key: a[key] - b[key] for key in a if a[key] != b[key]})
