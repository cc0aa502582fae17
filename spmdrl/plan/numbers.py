"""Tracks the numbers that are known on paper through every operation.

A program reads some of its numbers: lengths, masks, and how many tokens an expert gets. Integers that come from the
host are therefore known on paper too; experts are chosen evenly. Numbers that depend on weights are unknown; a program
that reads an unknown float gets 1.
"""

import math
import weakref
from typing import Any

import torch

from spmdrl.plan.storages import Storages

META = torch.device("meta")
MOST_KNOWN = {"activations": 1 << 25}
"""Largest tensor whose numbers are tracked, by purpose: masks and counts of a micro-batch."""
FEW_KNOWN = 1 << 20
"""Largest tensor whose numbers are tracked for other purposes, such as a model's buffers and an optimizer's state."""
aten = torch.ops.aten
Spec = tuple[list[int], list[str]]
"""Layout of flattened arguments: the length of each list (-1 for a plain argument), and the names of the last ones."""


class Numbers:
    """The known numbers of tensors on paper."""

    def __init__(self, storages: Storages):
        """storages: those of the device, which know the purpose of a tensor."""
        self.storages = storages
        self.known: dict[int, tuple[weakref.ref, torch.Tensor]] = {}
        """id of a tensor -> the tensor, and its numbers on the host."""
        self.unknown: set[int] = set()
        """Storages that hold unknown numbers, although tensors in them were known."""

    def value_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor on paper, on the host; None if they are unknown."""
        found = self.known.get(id(x))
        if found is None or found[0]() is not x or x.untyped_storage()._cdata in self.unknown:
            return None
        return found[1]

    def record(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Record the numbers of a tensor on paper. value: of its shape, on the host."""
        key = id(x)
        self.known[key] = weakref.ref(x, lambda _: self.known.pop(key, None)), value

    def forget(self, x: torch.Tensor) -> None:
        """Record that unknown numbers were written into a tensor, and so into all tensors of its storage."""
        self.known.pop(id(x), None)
        storage = x.untyped_storage()
        key = storage._cdata
        if x.device.type == "meta" and key not in self.unknown:
            self.unknown.add(key)
            # When the storage ends, before another one gets its address.
            weakref.finalize(storage, self.unknown.discard, key)

    def is_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> bool:
        """Return True if an operation's results follow from known numbers, and are few enough to compute."""
        if func.overloadpacket in _FILLS:
            args, kwargs = tree_unflatten(flat, spec)
            shape = args[0]
            if func.overloadpacket in (aten.arange, aten.scalar_tensor):
                return True
            if isinstance(shape, torch.Tensor):
                shape = (
                    args[1] if func.overloadpacket in (aten.new_zeros, aten.new_ones, aten.new_full) else shape.shape
                )
            return math.prod(shape) <= self.most()
        if not tensors or func.overloadpacket in _UNSET:
            return False
        return all(x.device.type != "meta" or self.value_of(x) is not None for x in tensors)

    def most(self) -> int:
        """Return the largest size of a tensor created at this moment whose numbers are tracked."""
        return MOST_KNOWN.get(self.storages.tag, FEW_KNOWN)

    def number(self, x: torch.Tensor) -> Any:
        """Return the single number of a tensor, 1.0 for an unknown float.

        Raises:
            RuntimeError: an integer is unknown.
        """
        value = self.value_of(x)
        if value is not None:
            return value.item()
        if x.dtype.is_floating_point:
            return 1.0
        raise RuntimeError(
            f"the program reads an integer {tuple(x.shape)} that depends on numbers which are unknown on paper"
        )

    def of_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> Any:
        """Run an operation on known numbers on the host, and record its results on paper."""
        like = func.overloadpacket in _FILLS
        host = [self._value(x, like) if isinstance(x, torch.Tensor) else x for x in flat]
        host = ["cpu" if isinstance(x, torch.device) else x for x in host]
        args, kwargs = tree_unflatten(host, spec)
        if func is aten.histc.default and not args[0].is_floating_point():
            # A GPU counts integers, the host only floats.
            value = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        else:
            value = func(*args, **kwargs)
        for x, h in zip(flat, host, strict=True):
            if isinstance(value, torch.Tensor) and value is h and isinstance(x, torch.Tensor):
                # An operation in place: the tensor on paper keeps its identity.
                return x
        if isinstance(value, torch.Tensor) and func.is_view and tensors and tensors[0].device.type == "meta":
            meta_args, meta_kwargs = tree_unflatten(flat, spec)
            out = func(*meta_args, **meta_kwargs)
            self.record(out, value)
            return out
        if isinstance(value, (tuple, list)):
            views = None
            if func.is_view and tensors and tensors[0].device.type == "meta":
                meta_args, meta_kwargs = tree_unflatten(flat, spec)
                views = func(*meta_args, **meta_kwargs)
            return type(value)(
                self.recorded(v, None if views is None else views[i]) if isinstance(v, torch.Tensor) else v
                for i, v in enumerate(value)
            )
        return self.recorded(value) if isinstance(value, torch.Tensor) else value

    def _value(self, x: torch.Tensor, like: bool) -> torch.Tensor:
        """Return the known numbers of a tensor; if only its shape matters, a tensor of that shape."""
        value = self.value_of(x)
        if value is None and like and x.device.type == "meta":
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return x if value is None else value

    def recorded(self, value: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor on paper with these numbers: `out`, or a new one."""
        if out is None:
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        if value.numel() <= self.most():
            self.record(out, value)
        return out

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a mask, on the host."""
        value = self.value_of(x) if x.device.type == "meta" else x
        if value is None:
            raise RuntimeError(f"a mask {tuple(x.shape)} is unknown on paper: it depends on weights")
        return value

    def indices(self, x: Any) -> list[Any]:
        """Return the indices along each dimension of a mask; return any other index unchanged."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
            return [self.recorded(rows) for rows in self.mask(x).nonzero(as_tuple=True)]
        return [x]

    def choose(self, chosen: torch.Tensor, among: int) -> None:
        """Record a choice that depends on weights: experts are chosen in turn, so that all get as many tokens."""
        self.record(chosen, (torch.arange(chosen.numel()) % among).view(chosen.shape))


_FILLS = {
    *(aten.zeros, aten.ones, aten.full, aten.arange, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.scalar_tensor),
}
"""Operations whose results do not depend on other tensors' numbers."""
_UNSET = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.rand_like, aten.randn_like, aten.bernoulli}
"""Operations whose results do not follow from their tensors."""


def is_host(x: Any) -> bool:
    """Return True for a host tensor with dimensions, with which an operation on paper cannot run."""
    return isinstance(x, torch.Tensor) and x.device.type != "meta" and x.ndim > 0


def tree_flatten(arguments: tuple[tuple, dict]) -> tuple[list, Spec]:
    """Flatten the arguments of an operation; lists among them hold only tensors or numbers."""
    args, kwargs = arguments
    flat, lengths = [], []
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            flat += x
            lengths.append(len(x))
        else:
            flat.append(x)
            lengths.append(-1)
    return flat, (lengths, list(kwargs))


def tree_unflatten(flat: list, spec: Spec) -> tuple[tuple, dict]:
    """Undo `tree_flatten`."""
    lengths, names = spec
    out, at = [], 0
    for n in lengths:
        out.append(flat[at] if n < 0 else flat[at : at + n])
        at += 1 if n < 0 else n
    count = len(out) - len(names)
    return tuple(out[:count]), dict(zip(names, out[count:], strict=True))
