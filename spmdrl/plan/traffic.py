"""Counts the bytes that a rank sends in collectives, by the axis of their group and the kind of collective.

A collective of n ranks is counted as on a ring: each rank sends (n - 1) / n of an all-gather's result, of a
reduce-scatter's input and of an all-to-all, twice that share of an all-reduce, and the tensor of a send, broadcast,
reduce, gather or scatter once.
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
"""Start of an operation's name -> kind of collective. The first match counts: `reduce_scatter` is before `reduce`."""


@dataclass
class Traffic:
    """Bytes and calls of the collectives of one rank."""

    bytes: Counter = field(default_factory=Counter)
    """(axis, kind of collective) -> bytes sent; on the axis `push` (weights to engines) also bytes received."""
    calls: Counter = field(default_factory=Counter)
    """(axis, kind of collective) -> number of collectives or messages."""
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of an axis -> the ranks of this rank's group on the axis."""
    names: dict[str, str] = field(default_factory=dict)
    """Name of a group -> its axis. Ranks cannot be the key, because groups of several axes may have the same ranks."""
    peers: Counter = field(default_factory=Counter)
    """(`send` or `receive`, rank) -> bytes of the policy's weights sent to or received from that rank."""

    def copy(self) -> "Traffic":
        """Return a copy of the counts."""
        return replace(self, bytes=Counter(self.bytes), calls=Counter(self.calls), peers=Counter(self.peers))

    def since(self, before: "Traffic") -> "Traffic":
        """Return the counts since an earlier `copy`."""
        counts = {name: _less(getattr(self, name), getattr(before, name)) for name in ("bytes", "calls", "peers")}
        return replace(self, **counts)

    def call(self, group: Any, axis: str) -> None:
        """Record which mesh axis a process group of this rank belongs to, unless the group has only one rank."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.names[group.group_name], self.axes[axis] = axis, ranks

    def axis(self, group: Any) -> str:
        """Return the axis of a group; a group without an axis gets one named after its size, such as `8 ranks`."""
        if group.group_name not in self.names:
            self.call(group, f"{group.size()} ranks")
        return self.names[group.group_name]

    def note(self, func: Any, args: tuple) -> None:
        """Count one collective operation of torch's namespace c10d."""
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
    """Return the bytes that one of n ranks sends in a collective on a ring."""
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
