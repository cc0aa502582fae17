"""Tracks the known values of meta tensors through every operation.

A simulated program reads some tensor values: lengths, masks, and the number of tokens per expert. Values that originate
on the host are therefore tracked, and tokens are assumed to be routed evenly. Values that depend on weights are
unknown; reading an unknown float returns 1.
"""

import math
import weakref
from typing import Any

import torch

from spmdrl.plan.storages import Storages

META = torch.device("meta")
MOST_KNOWN = {"activations": 1 << 25}
"""Purpose -> size limit of a tracked tensor, in elements. `activations` includes masks."""
FEW_KNOWN = 1 << 20
"""Size limit of a tracked tensor, in elements, for all other purposes, such as model buffers."""
aten = torch.ops.aten
Spec = tuple[list[int], list[str]]
"""Layout of flattened arguments: a length for each list argument or -1 for any other, and the keyword names."""


class Numbers:
    """The known values of meta tensors."""

    def __init__(self, storages: Storages):
        """storages: the device's live storages. Their current `tag` (purpose) sets the size limit for tracking."""
        self.storages = storages
        self.known: dict[int, tuple[weakref.ref, torch.Tensor]] = {}
        """Tensor id -> weak reference to the tensor, and its values on the host."""
        self.unknown: set[int] = set()
        """Storages that contain unknown values; every tensor in them is unknown."""

    def value_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values on the host, or None if they are unknown."""
        found = self.known.get(id(x))
        if found is None or found[0]() is not x or x.untyped_storage()._cdata in self.unknown:
            return None
        return found[1]

    def record(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Record a tensor's values. value: host tensor of the same shape."""
        key = id(x)
        self.known[key] = weakref.ref(x, lambda _: self.known.pop(key, None)), value

    def forget(self, x: torch.Tensor) -> None:
        """Mark a tensor, and all tensors that share its storage, as unknown."""
        self.known.pop(id(x), None)
        storage = x.untyped_storage()
        key = storage._cdata
        if x.device.type == "meta" and key not in self.unknown:
            self.unknown.add(key)
            # Remove the entry when the storage is freed, before its address can be reused.
            weakref.finalize(storage, self.unknown.discard, key)

    def is_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> bool:
        """Return True if an operation's results depend only on known values and are small enough to compute."""
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
        """Return the size limit of a tracked tensor, in elements, for the current purpose."""
        return MOST_KNOWN.get(self.storages.tag, FEW_KNOWN)

    def number(self, x: torch.Tensor) -> Any:
        """Return the value of a one-element tensor, or 1.0 for an unknown float.

        Raises:
            RuntimeError: the value is an unknown integer.
        """
        value = self.value_of(x)
        if value is not None:
            return value.item()
        if x.dtype.is_floating_point:
            return 1.0
        raise RuntimeError(
            f"the program reads an integer tensor {tuple(x.shape)}, whose values are unknown to a plan: they depend on "
            "weights"
        )

    def of_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> Any:
        """Run an operation on known values on the host, and record its results."""
        like = func.overloadpacket in _FILLS
        host = [self._value(x, like) if isinstance(x, torch.Tensor) else x for x in flat]
        host = ["cpu" if isinstance(x, torch.device) else x for x in host]
        args, kwargs = tree_unflatten(host, spec)
        if func is aten.histc.default and not args[0].is_floating_point():
            # `histc` counts integers on a GPU, but only floats on the host.
            value = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        else:
            value = func(*args, **kwargs)
        for x, h in zip(flat, host, strict=True):
            if isinstance(value, torch.Tensor) and value is h and isinstance(x, torch.Tensor):
                # An in-place operation returns the meta tensor that it modified.
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
        """Return a tensor's known values on the host. like: True to return uninitialized values if they are unknown."""
        value = self.value_of(x)
        if value is None and like and x.device.type == "meta":
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return x if value is None else value

    def recorded(self, value: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Record values for the meta tensor `out` (created if None), unless it is too large, and return it."""
        if out is None:
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        if value.numel() <= self.most():
            self.record(out, value)
        return out

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mask's values on the host.

        Raises:
            RuntimeError: the values are unknown.
        """
        value = self.value_of(x) if x.device.type == "meta" else x
        if value is None:
            raise RuntimeError(f"a mask {tuple(x.shape)} is unknown to a plan: it depends on weights")
        return value

    def indices(self, x: Any) -> list[Any]:
        """Convert a mask to index tensors, one per dimension; return any other index unchanged."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
            return [self.recorded(rows) for rows in self.mask(x).nonzero(as_tuple=True)]
        return [x]

    def choose(self, chosen: torch.Tensor, among: int) -> None:
        """Record an even expert assignment (0 to `among` - 1 in turn), because real routing depends on weights."""
        self.record(chosen, (torch.arange(chosen.numel()) % among).view(chosen.shape))


_FILLS = {
    *(aten.zeros, aten.ones, aten.full, aten.arange, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.scalar_tensor),
}
"""Operations whose results do not depend on tensor values."""
_UNSET = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.rand_like, aten.randn_like, aten.bernoulli}
"""Operations with undefined or random results."""


def is_host(x: Any) -> bool:
    """Return True for a host tensor of at least one dimension, which torch cannot combine with meta tensors."""
    return isinstance(x, torch.Tensor) and x.device.type != "meta" and x.ndim > 0


def tree_flatten(arguments: tuple[tuple, dict]) -> tuple[list, Spec]:
    """Flatten an operation's arguments. List arguments contain only tensors or numbers."""
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
    """Rebuild the arguments that `tree_flatten` flattened."""
    lengths, names = spec
    out, at = [], 0
    for n in lengths:
        out.append(flat[at] if n < 0 else flat[at : at + n])
        at += 1 if n < 0 else n
    count = len(out) - len(names)
    return tuple(out[:count]), dict(zip(names, out[count:], strict=True))
