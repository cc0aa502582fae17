"""Counts the bytes that a rank sends in collectives, by mesh axis and collective type.

A collective over n ranks is counted as a ring algorithm. Each rank sends (n - 1) / n of the all-gather output, the
reduce-scatter input or the all-to-all buffer, and 2 (n - 1) / n of the tensor in an all-reduce. For a send, broadcast,
reduce, gather or scatter, each rank sends the tensor once.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
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
"""Operation name prefix -> collective type. The first match wins, so `reduce_scatter` precedes `reduce`."""


@dataclass
class Traffic:
    """Bytes and calls of one rank's collectives."""

    bytes: Counter = field(default_factory=Counter)
    """(axis, collective type) -> bytes sent. The axis `push` (weights to engines) also counts bytes received."""
    calls: Counter = field(default_factory=Counter)
    """(axis, collective type) -> number of collectives or messages."""
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Axis name -> ranks in this rank's group on that axis."""
    names: dict[str, str] = field(default_factory=dict)
    """Group name -> its axis. Ranks cannot serve as keys, because groups of different axes can have the same ranks."""
    peers: Counter = field(default_factory=Counter)
    """(`send` or `receive`, rank) -> bytes of policy weights exchanged with that rank."""

    def copy(self) -> "Traffic":
        """Return a copy of the counts."""
        return replace(self, bytes=Counter(self.bytes), calls=Counter(self.calls), peers=Counter(self.peers))

    def since(self, before: "Traffic") -> "Traffic":
        """Return the counts since an earlier `copy`."""
        counts = {name: _less(getattr(self, name), getattr(before, name)) for name in ("bytes", "calls", "peers")}
        return replace(self, **counts)

    def call(self, group: Any, axis: str) -> None:
        """Record the mesh axis of one of this rank's process groups, unless the group has only one rank."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.names[group.group_name], self.axes[axis] = axis, ranks

    def axis(self, group: Any) -> str:
        """Return a group's axis; a group without one is assigned an axis named after its size, such as `8 ranks`."""
        if group.group_name not in self.names:
            self.call(group, f"{group.size()} ranks")
        return self.names[group.group_name]

    def note(self, func: Any, args: tuple) -> None:
        """Count one collective from torch's c10d namespace."""
        word = func.overloadpacket.__name__.strip("_")
        kind = next((kind for begin, kind in KINDS.items() if word.startswith(begin)), word)
        group = next((g for g in map(_group, args) if g is not None), None)
        if group is not None and group.size() > 1:
            self.add(kind, group, sent(kind, group.size(), group.rank(), args))

    def add(self, kind: str, group: Any, size: int) -> None:
        """Count one collective, or one message, of `size` bytes."""
        self.put(self.axis(group), kind, size)

    def put(self, axis: str, kind: str, size: int) -> None:
        """Count one collective of `size` bytes on an axis."""
        key = axis, kind
        self.calls[key] += 1
        self.bytes[key] += size


def sent(kind: str, n: int, rank: int, args: tuple) -> int:
    """Return the bytes that one of n ranks sends in a ring collective."""
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
