"""Counts what a rank's program allocates, sends and multiplies, on tensors that have no values.

A plan runs the program itself on torch's `meta` device, which stands for the device of a rank. `Paper` sees every
operation: it follows the storages that live, keeps the most that lived at a time and of what, adds up the bytes of
collectives by group, and the floating-point operations of matrix products.

A program looks at some of its numbers: at lengths, masks, and how many tokens an expert gets. Integers that come from
the host are therefore known on paper too, through every operation on them; the choice of experts is taken to be even.
Numbers that depend on weights are not known: where a program asks for one, it is told 1.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spmdrl.plan.traffic import Traffic

META = torch.device("meta")
MOST_KNOWN = {"activations": 1 << 25}
"""Most numbers of one tensor that are known on paper by what they are for: masks and counts of a micro-batch."""
FEW_KNOWN = 1 << 20
"""Most numbers of one tensor of other kinds, such as a model's buffers and an optimizer's state."""
aten = torch.ops.aten


@dataclass
class Moment:
    """Bytes that live at a moment, by what they are for."""

    live: int = 0
    by_tag: dict[str, int] = field(default_factory=dict)


class Paper(TorchDispatchMode):
    """Follows memory, traffic and operations of the program inside this context."""

    def __init__(self, traffic: Traffic | None = None, device: str = "meta"):
        """traffic: collects the collectives. device: type of the tensors that are counted, `cpu` for a real run."""
        super().__init__()
        self.traffic, self.device = traffic or Traffic(), device
        self.flops = 0
        self.live, self.by_tag = 0, Counter()
        self.peak = Moment()
        self.tag = "activations"
        self.held: dict[int, tuple[int, str]] = {}
        self.known: dict[int, tuple[weakref.ref, torch.Tensor]] = {}
        """id of a tensor -> the tensor, and its numbers on the host."""
        self.aside = False
        """True while a library computes shapes by tensors of its own, which no rank would hold."""
        self.unknown: set[int] = set()
        """Storages that hold unknown numbers, although tensors of them were known."""
        self.host: dict[str, int] = {}
        """Bytes in host memory, by what they are for."""
        self.parked: Counter = Counter()
        """Bytes of tensors that are off the device, by place (`host`, `disk`)."""
        self.to_host = self.from_host = 0

    # ── memory ───────────────────────────────────────────────────────────────

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """What is allocated inside is for `tag`."""
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before

    def lap(self) -> Moment:
        """Return the moment with the most bytes since the last call, and start anew from this moment."""
        most, self.peak = self.peak, Moment(self.live, dict(self.by_tag))
        return most

    def retag(self, tensors: list[Any], tag: str) -> None:
        """Count the storages of these tensors as `tag` from this moment on."""
        for x in tensors:
            key = getattr(x, "_local_tensor", x).untyped_storage()._cdata
            if key in self.held:
                size, old = self.held[key]
                self.by_tag[old] -= size
                self.by_tag[tag] += size
                self.held[key] = size, tag

    def _grow(self, key: int, size: int, tag: str) -> None:
        self.live += size
        self.by_tag[tag] += size
        if self.live > self.peak.live:
            self.peak = Moment(self.live, dict(self.by_tag))

    def see(self, x: torch.Tensor) -> None:
        """Follow the storage of a tensor from this moment to its end."""
        if x.device.type != self.device:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        size = storage.nbytes()
        self.held[key] = size, self.tag
        weakref.finalize(storage, self._ended, key)
        self._grow(key, size, self.tag)

    def _ended(self, key: int) -> None:
        self.unknown.discard(key)
        size, tag = self.held.pop(key, (0, ""))
        self.live -= size
        self.by_tag[tag] -= size

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size than before."""
        key = storage._cdata
        if key in self.held:
            size, tag = self.held[key]
            self.held[key] = storage.nbytes(), tag
            self._grow(key, storage.nbytes() - size, tag)

    # ── known numbers ────────────────────────────────────────────────────────

    def told(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor on paper, on the host; None if they are unknown."""
        found = self.known.get(id(x))
        if found is None or found[0]() is not x or x.untyped_storage()._cdata in self.unknown:
            return None
        return found[1]

    def tell(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Note the numbers of a tensor on paper. value: of its shape, on the host."""
        key = id(x)
        self.known[key] = weakref.ref(x, lambda _: self.known.pop(key, None)), value

    def forget(self, x: torch.Tensor) -> None:
        """Note that unknown numbers were written into a tensor, and so into all that share its storage."""
        self.known.pop(id(x), None)
        # A storage that is followed is taken off the list at its end, before another one gets its address.
        self.see(x)
        key = x.untyped_storage()._cdata
        if key in self.held:
            self.unknown.add(key)

    # ── operations ───────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation on paper."""
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            # It comes back as operations on shards, which are what a rank holds.
            return NotImplemented
        if self.aside:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.traffic.note(func, args)
            out = func(*args, **kwargs)
            self._told(func, args)
        elif self.device != "meta":
            out = func(*args, **kwargs)
        else:
            out = self._computed(func, args, kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return out

    def _told(self, func: Any, args: tuple) -> None:
        """What a collective brings is known where this rank's own part is: on paper all ranks send the same."""
        if self.device == "meta" and func is torch.ops.c10d._allgather_base_.default:
            into, mine = args[0], args[1]
            value = self.told(mine)
            if value is None:
                self.forget(into)
            if value is not None:
                self.tell(into, value.flatten().repeat(into.numel() // max(1, mine.numel())).view(into.shape))

    def _computed(self, func: Any, args: tuple, kwargs: dict) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        on_paper = any(x.device.type == "meta" for x in tensors) or kwargs.get("device") == META
        if not on_paper:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._number(tensors[0])
        leaving = func in (aten._to_copy.default, aten.copy_.default) and self._leaves(func, args, kwargs)
        if leaving:
            return self._host_copy(func, args, kwargs)
        if self._is_known(func, flat, spec, tensors):
            return self._of_known(func, flat, spec, tensors)
        changed = _changed(func, args, kwargs)
        for x in changed:
            self.forget(x)
        if func in _NO_OPERATION:
            return args[0] if func._schema.returns else None
        flat = [x.to(META) if _is_host(x) else x for x in flat]
        args, kwargs = tree_unflatten(flat, spec)
        if func is aten.masked_select.default:
            return args[0].new_empty(int(self._mask(args[1]).expand(args[0].shape).sum()))
        if func in _BY_INDEX:
            args = (args[0], [row for i in args[1] for row in self._indices(i)], *args[2:])
        out = func(*args, **kwargs)
        if func is aten.topk.default:
            self._choose(out[1], args[0].shape[args[3] if len(args) > 3 else -1])
        return out

    def _is_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> bool:
        """True if an operation's results follow from known numbers, and are few enough to be worth it."""
        if func.overloadpacket in _FILLS:
            args, kwargs = tree_unflatten(flat, spec)
            shape = args[0]
            if func.overloadpacket in (aten.arange, aten.scalar_tensor):
                return True
            if isinstance(shape, torch.Tensor):
                shape = (
                    args[1] if func.overloadpacket in (aten.new_zeros, aten.new_ones, aten.new_full) else shape.shape
                )
            return math.prod(shape) <= self._most()
        if not tensors or func.overloadpacket in _UNSET:
            return False
        return all(x.device.type != "meta" or self.told(x) is not None for x in tensors)

    def _most(self) -> int:
        return MOST_KNOWN.get(self.tag, FEW_KNOWN)

    def _leaves(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if func is aten.copy_.default:
            return args[0].device.type != "meta"
        device = kwargs.get("device")
        return device is not None and torch.device(device).type != "meta" and args[0].device.type == "meta"

    def _host_copy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A copy to the host: what is known, and else ones."""
        source = args[1] if func is aten.copy_.default else args[0]
        value = self.told(source)
        if value is None:
            value = torch.ones(source.shape, dtype=source.dtype)
        if func is aten.copy_.default:
            return args[0].copy_(value)
        return value.to(kwargs.get("dtype") or source.dtype)

    def _number(self, x: torch.Tensor) -> Any:
        value = self.told(x)
        if value is not None:
            return value.item()
        if x.dtype.is_floating_point:
            return 1.0
        raise RuntimeError(
            f"the program reads an integer {tuple(x.shape)} that depends on numbers which are unknown on paper"
        )

    def _of_known(self, func: Any, flat: list, spec: Any, tensors: list[torch.Tensor]) -> Any:
        """Run an operation on known numbers on the host, and note its results on paper."""
        like = func.overloadpacket in _FILLS
        host = [self._value(x, like) if isinstance(x, torch.Tensor) else x for x in flat]
        host = ["cpu" if isinstance(x, torch.device) else x for x in host]
        args, kwargs = tree_unflatten(host, spec)
        value = func(*args, **kwargs)
        for x, h in zip(flat, host, strict=True):
            if isinstance(value, torch.Tensor) and value is h and isinstance(x, torch.Tensor):
                # An operation in place: the tensor on paper keeps its identity.
                return x
        if isinstance(value, torch.Tensor) and func.is_view and tensors and tensors[0].device.type == "meta":
            meta_args, meta_kwargs = tree_unflatten(flat, spec)
            out = func(*meta_args, **meta_kwargs)
            self.tell(out, value)
            return out
        if isinstance(value, (tuple, list)):
            views = None
            if func.is_view and tensors and tensors[0].device.type == "meta":
                meta_args, meta_kwargs = tree_unflatten(flat, spec)
                views = func(*meta_args, **meta_kwargs)
            return type(value)(
                self._noted(v, None if views is None else views[i]) if isinstance(v, torch.Tensor) else v
                for i, v in enumerate(value)
            )
        return self._noted(value) if isinstance(value, torch.Tensor) else value

    def _value(self, x: torch.Tensor, like: bool) -> torch.Tensor:
        """The known numbers of a tensor; of one that only says the shape of a result, a tensor of that shape."""
        value = self.told(x)
        if value is None and like and x.device.type == "meta":
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return x if value is None else value

    def _noted(self, value: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        if value.numel() <= self._most():
            self.tell(out, value)
        return out

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        """The values of a mask."""
        value = self.told(x) if x.device.type == "meta" else x
        if value is None:
            raise RuntimeError(f"a mask {tuple(x.shape)} is unknown on paper: it depends on weights")
        return value

    def _indices(self, x: Any) -> list[Any]:
        """Indices along each dimension of a mask, if it is one; else the index as it is."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
            return [self._noted(rows) for rows in self._mask(x).nonzero(as_tuple=True)]
        return [self._noted(x) if _is_host(x) else x]

    def _choose(self, chosen: torch.Tensor, among: int) -> None:
        """Make a choice known that depends on weights: experts are chosen in turn, so that all get as many tokens."""
        self.tell(chosen, (torch.arange(chosen.numel()) % among).view(chosen.shape))


PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Products of matrices, and the place of the first matrix among their arguments."""


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the floating-point operations of a matrix product or of attention; 0 for other operations."""
    packet = func.overloadpacket
    if packet in PRODUCTS:
        a, b = args[PRODUCTS[packet]], args[PRODUCTS[packet] + 1]
        return 2 * a.numel() * b.shape[-1]
    if "attention" not in packet.__name__:
        return 0
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=out) if count else 0


Spec = tuple[list[int], list[str]]
"""How arguments were laid flat: the length of each list among them (-1 for a plain one), and names of the last."""


def tree_flatten(arguments: tuple[tuple, dict]) -> tuple[list, Spec]:
    """Lay the arguments of an operation flat; lists among them hold tensors or numbers and nothing deeper."""
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


_FILLS = {
    *(aten.zeros, aten.ones, aten.full, aten.arange, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.scalar_tensor),
}
"""Operations that make tensors of numbers that follow from no other tensor's."""
_UNSET = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.rand_like, aten.randn_like, aten.bernoulli}
"""Operations whose results do not follow from their tensors."""
_BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
_NO_OPERATION = {aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr}
"""Operations in place for which torch has no form without values."""


def _is_host(x: Any) -> bool:
    """True for a tensor of the host with a dimension, beside which an operation on paper cannot run."""
    return isinstance(x, torch.Tensor) and x.device.type != "meta" and x.ndim > 0


def _changed(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operation writes into."""
    changed = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            changed += [x] if isinstance(x, torch.Tensor) else [y for y in x or () if isinstance(y, torch.Tensor)]
    return changed
