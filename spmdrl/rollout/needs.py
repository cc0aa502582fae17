"""What an engine's loader reads of a checkpoint's tensors, seen by letting it load tensors that are watched.

Nothing has to be known of how an engine cuts q, k and v, experts or the vocabulary over its ranks: each rank runs its
own loader once, and the copies it would make say which part of which tensor it wants. This file needs torch alone: the
processes of a server engine load it too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Box = tuple[tuple[int, int], ...]


@dataclass
class Needs:
    """What one rank's loader reads."""

    boxes: list[tuple[int, Box]] = field(default_factory=list)
    """(tensor, range in every dimension), one for each read."""
    counted: list[bool] = field(default_factory=list)
    """Of each read: its words stand in the model as they are, so that sums of them can be compared on both sides."""
    uncounted: frozenset[int] = frozenset()
    """Addresses of the storages of the model for which that does not hold."""
    exact: bool = True
    """Every read was a plain copy into the model."""


def touched(x: torch.Tensor, whole: torch.Tensor) -> Box:
    """The box of a contiguous tensor that holds all elements of `x`, a view of it with at least one.

    The smallest one, but where steps over a flattened tensor leap from row to row: there it takes rows whole.
    """
    # In bytes, so that a view may also be of another type.
    start, size = int(x.storage_offset()) * x.itemsize, whole.numel() * whole.itemsize
    steps = [(int(n), int(step) * x.itemsize) for n, step in zip(x.shape, x.stride(), strict=True)] + [(x.itemsize, 1)]
    box = []
    for n in whole.shape:
        # Where in the rows of this dimension, `size` bytes each, the view begins, and how far beyond that it reaches.
        a = start % size
        b = a + sum((count - 1) * (step % size) for count, step in steps)
        inner = size // n
        box.append((a // inner, b // inner + 1) if b < size else (0, n))
        size = inner
    return tuple(box)


def once(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors without those whose memory another of them has: a part of its rows, or the same under another name."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for x in sorted(tensors, key=lambda x: -x.nbytes):
        start = int(x.storage_offset()) * x.itemsize
        held = spans.setdefault(x.untyped_storage().data_ptr(), [])
        if not any(a <= start and start + x.nbytes <= b for a, b in held):
            held.append((start, start + x.nbytes))
            yield x


class Watch(TorchDispatchMode):
    """Records which part of a watched tensor an operation reads; copies of it are not made."""

    def __init__(self):
        super().__init__()
        self.needs = Needs()
        self.watched: dict[int, tuple[int, torch.Tensor]] = {}
        self.into: list[int] = []
        self.odd: set[int] = set()

    def watch(self, index: int, tensor: torch.Tensor) -> None:
        """See to a tensor; it replaces one that had the same address and is gone."""
        self.watched[tensor.untyped_storage().data_ptr()] = (index, tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """One operation."""
        kwargs = kwargs or {}
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        tensors = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
        read = [x for x in tensors if x.untyped_storage().data_ptr() in self.watched]
        if func is torch.ops.aten.copy_.default and len(read) == 1 and read[0] is args[1]:
            self._record(read[0], args[0])
            return args[0]
        for x in read:
            self._record(x, None)
        return func(*args, **kwargs)

    def _record(self, x: torch.Tensor, into: torch.Tensor | None) -> None:
        if not x.numel():
            return
        index, whole = self.watched[x.untyped_storage().data_ptr()]
        self.needs.boxes.append((index, touched(x, whole)))
        self.into.append(into.untyped_storage().data_ptr() if into is not None else 0)
        if into is None:
            self.needs.exact = False
        # Sums are of words of 8 bytes: a part that does not begin and end with one has no sum of its own.
        elif into.nbytes % 8 or into.storage_offset() * into.itemsize % 8 or into.dtype != x.dtype:
            self.odd.add(self.into[-1])

    def done(self) -> Needs:
        """All that was seen."""
        self.needs.uncounted = frozenset(self.odd)
        self.needs.counted = [place not in self.odd for place in self.into]
        return self.needs


def watched_load(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
) -> Needs:
    """What `load` reads of tensors with these names, shapes and types; the model it fills stays as it is.

    The watched tensors are on the CPU and nothing is written to them or read, so they take no memory.
    """
    watch = Watch()

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, shape, dtype) in enumerate(tensors):
            tensor = torch.empty(shape, dtype=dtype)
            watch.watch(index, tensor)
            yield name, tensor

    with torch.no_grad(), watch:
        load(given())
    return watch.done()
