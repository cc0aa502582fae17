"""Finds out which parts of checkpoint tensors an engine's loader reads, by recording the copies it makes.

Each rank runs the engine's loader once on uninitialized tensors. The recorded copies show which part of each tensor the
rank needs, no matter how the engine shards q, k and v, experts or the vocabulary. This file imports only torch, because
the processes of a server engine load it too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Box = tuple[tuple[int, int], ...]
"""A rectangular slice of a tensor: a pair (start, end) of indices for every dimension. The end is exclusive."""


@dataclass
class Needs:
    """The parts of tensors that one rank's loader reads."""

    boxes: list[tuple[int, Box]] = field(default_factory=list)
    """For each read: (index of the tensor, index range in every dimension)."""
    counted: list[bool] = field(default_factory=list)
    """For each read: True if the model stores the bytes unchanged, so that their checksum can be compared."""
    uncounted: frozenset[int] = frozenset()
    """Addresses of the model's storages that are excluded from checksums."""
    exact: bool = True
    """True if every read was a plain copy into the model."""
    filled: frozenset[int] = frozenset()
    """Addresses of the storages that the loader wrote to."""


def touched(x: torch.Tensor, whole: torch.Tensor) -> Box:
    """Return a box of the contiguous tensor `whole` that contains all elements of its non-empty view `x`.

    The box is as small as possible, unless the view strides over a flattened tensor and jumps between rows. In that
    case, the box contains complete rows.
    """
    # Offsets are in bytes, because the view may have a different dtype.
    start, size = int(x.storage_offset()) * x.itemsize, whole.numel() * whole.itemsize
    steps = [(int(n), int(step) * x.itemsize) for n, step in zip(x.shape, x.stride(), strict=True)] + [(x.itemsize, 1)]
    box = []
    for n in whole.shape:
        # a, b: first and last byte of the view, relative to the row of `size` bytes that contains its first byte.
        a = start % size
        b = a + sum((count - 1) * (step % size) for count, step in steps)
        inner = size // n
        box.append((a // inner, b // inner + 1) if b < size else (0, n))
        size = inner
    return tuple(box)


def transposed(x: torch.Tensor, into: torch.Tensor) -> bool:
    """Return True if elements that are adjacent in one of the two tensors are not adjacent in the other."""
    if x.itemsize == 8:
        return False
    dims = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
    return any(t.stride(dim) == 1 for t in (x, into) for dim in dims[:-1])


def once(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors, except those whose memory lies within another tensor's, such as tied weights or row slices."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for x in sorted(tensors, key=lambda x: -x.nbytes):
        start = int(x.storage_offset()) * x.itemsize
        held = spans.setdefault(x.untyped_storage().data_ptr(), [])
        if not any(a <= start and start + x.nbytes <= b for a, b in held):
            held.append((start, start + x.nbytes))
            yield x


FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
"""Operations that loaders use to zero the padding next to copied parts."""


class Watch(TorchDispatchMode):
    """Records which parts of watched tensors are read.

    Copies from watched tensors are recorded but not executed.
    """

    def __init__(self):
        super().__init__()
        self.needs = Needs()
        self.watched: dict[int, tuple[int, torch.Tensor]] = {}
        self.into: list[int] = []
        self.odd: set[int] = set()
        self.written: set[int] = set()

    def watch(self, index: int, tensor: torch.Tensor) -> None:
        """Watch a tensor, replacing any earlier watched tensor at the same address."""
        self.watched[tensor.untyped_storage().data_ptr()] = (index, tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record one operation, and run it unless it is a copy from a watched tensor."""
        kwargs = kwargs or {}
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        places = set(written_by(func, args, kwargs)) if func._schema.is_mutable else set()
        self.written |= places
        # `cat` and similar operations take a list of tensors.
        inputs = [x for each in [*args, *kwargs.values()] for x in (each if isinstance(each, list | tuple) else [each])]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        read = [x for x in tensors if x.untyped_storage().data_ptr() in self.watched]
        if func is torch.ops.aten.copy_.default and len(read) == 1 and read[0] is args[1]:
            self._record(read[0], args[0])
            return args[0]
        for x in read:
            self._record(x, None)
        if func not in FILLS:
            # A part that is modified in place after being copied (Mamba's state decay) differs from the sent bytes, so
            # it has no checksum.
            self.odd |= places & set(self.into)
        return func(*args, **kwargs)

    def _record(self, x: torch.Tensor, into: torch.Tensor | None) -> None:
        if not x.numel():
            return
        index, whole = self.watched[x.untyped_storage().data_ptr()]
        self.needs.boxes.append((index, touched(x, whole)))
        self.into.append(into.untyped_storage().data_ptr() if into is not None else 0)
        if into is None:
            self.needs.exact = False
        # Checksums are sums of 8-byte words. A part has no checksum if it does not start and end at a word boundary, or
        # if its adjacent elements are not adjacent in the model (GPT-2's weights are transposed).
        elif (
            into.nbytes % 8 or into.storage_offset() * into.itemsize % 8 or into.dtype != x.dtype or transposed(x, into)
        ):
            self.odd.add(self.into[-1])

    def done(self) -> Needs:
        """Return all recorded reads."""
        self.needs.uncounted, self.needs.filled = frozenset(self.odd), frozenset(self.written)
        self.needs.counted = [place not in self.odd for place in self.into]
        return self.needs


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[int]:
    """Yield the addresses of the storages that an operation writes to, according to its schema."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
            yield value.untyped_storage().data_ptr()


def unfilled(model: torch.nn.Module, needs: Needs, kinds: Iterable[str]) -> list[str]:
    """Return the names of an engine's parameters and persistent buffers that its loader did not write.

    A buffer is skipped if the checkpoint has no tensor of the same kind, because the model computes such buffers
    itself.

    kinds: last components of the checkpoint's tensor names, such as `weight`.
    """
    kept, kinds = model.state_dict().keys(), set(kinds)
    buffers = [(n, x) for n, x in model.named_buffers() if n in kept and n.rpartition(".")[2] in kinds]
    held = [*model.named_parameters(), *buffers]
    return [n for n, x in held if x.numel() and x.untyped_storage().data_ptr() not in needs.filled]


def check_filled(engine: str, lacking: list[str]) -> None:
    """Raise ValueError if the trainer did not send all the weights of an engine that started uninitialized."""
    if lacking:
        raise ValueError(
            f"--rollout.engine {engine}: the trainer has no tensor for {len(lacking)} of the engine's weights "
            f"({', '.join(lacking[:3])}): {engine} builds another model from this folder than transformers does; take "
            "another engine, such as hf"
        )


def cannot_load(engine: str, model: torch.nn.Module, error: Exception) -> ValueError:
    """Return the error to raise if the engine's loader for this model fails on the trainer's tensors."""
    return ValueError(
        f"--rollout.engine {engine}: its {type(model).__name__} cannot load the tensors of this model "
        f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); take another engine, such as hf"
    )


def watched_load(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
) -> Needs:
    """Find which parts `load` reads of tensors with the given names, shapes and dtypes, without changing the model.

    The tensors are on the CPU and never accessed, so they take no physical memory.
    """
    watch = Watch()

    def inputs() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, shape, dtype) in enumerate(tensors):
            tensor = torch.empty(shape, dtype=dtype)
            watch.watch(index, tensor)
            yield name, tensor

    with torch.no_grad(), watch:
        load(inputs())
    return watch.done()
