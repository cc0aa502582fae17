"""Counts the memory, traffic and FLOPs of a rank's program on meta tensors (tensors without data).

A plan runs the real program on torch's `meta` device in place of the rank's device. `Paper` intercepts every operation:
it tracks live storages, and sums the bytes of collectives per axis and the FLOPs of matrix products and attention.
Classes with "Paper" in their name belong to the simulation.
"""

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spmdrl.plan.numbers import META, Numbers, is_host, tree_flatten, tree_unflatten
from spmdrl.plan.storages import Storages
from spmdrl.plan.traffic import Traffic

aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._grouped_mm: 0}
"""Matrix product -> index of the argument that is its first matrix.

`_grouped_mm` multiplies each row by only one of several matrices, so its FLOPs are counted as for `mm`."""


class Paper(Storages, TorchDispatchMode):
    """Context manager that counts the memory, traffic and FLOPs of the program that runs inside it."""

    def __init__(self, traffic: Traffic | None = None, device: str = "meta"):
        """traffic: counts the collectives. device: the device type to count, `meta` in plans or `cpu` in real runs."""
        Storages.__init__(self, device)
        TorchDispatchMode.__init__(self)
        self.traffic, self.numbers = traffic or Traffic(), Numbers(self)
        self.flops = 0
        self.aside = False
        """True while a library computes shapes with temporary tensors, which a real rank does not allocate."""
        self.host: dict[str, int] = {}
        """Bytes in host memory, by purpose."""
        self.parked: Counter[str] = Counter()
        """Bytes of offloaded tensors, by location (`host`, `disk`)."""
        self.to_host = self.from_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation and count its memory, traffic and FLOPs."""
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            # DTensor dispatches operations on local shards, which are counted when they run.
            return NotImplemented
        if self.aside:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.traffic.note(func, args)
            out = func(*args, **kwargs)
            self._record_gather(func, args)
        elif self.device != "meta":
            out = func(*args, **kwargs)
        else:
            out = self._computed(func, args, kwargs)
        self.flops += _flops_of(func, args, kwargs, out)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return out

    def _record_gather(self, func: Any, args: tuple) -> None:
        """Record an all-gather's result as if all ranks sent this rank's values. Unknown values stay unknown."""
        if self.device == "meta" and func is torch.ops.c10d._allgather_base_.default:
            into, mine = args[0], args[1]
            value = self.numbers.value_of(mine)
            if value is None:
                self.numbers.forget(into)
            if value is not None:
                self.numbers.record(into, value.flatten().repeat(into.numel() // max(1, mine.numel())).view(into.shape))

    def _computed(self, func: Any, args: tuple, kwargs: dict) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        on_paper = any(x.device.type == "meta" for x in tensors) or kwargs.get("device") == META
        if not on_paper:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.numbers.number(tensors[0])
        leaving = func in (aten._to_copy.default, aten.copy_.default) and self._leaves(func, args, kwargs)
        if leaving:
            return self._host_copy(func, args, kwargs)
        if self.numbers.is_known(func, flat, spec, tensors):
            return self.numbers.of_known(func, flat, spec, tensors)
        changed = _changed_by(func, args, kwargs)
        for x in changed:
            self.numbers.forget(x)
        if func in _NO_OPERATION:
            return args[0] if func._schema.returns else None
        flat = [self.numbers.recorded(x) if is_host(x) else x for x in flat]
        args, kwargs = tree_unflatten(flat, spec)
        if func is aten.masked_select.default:
            return args[0].new_empty(int(self.numbers.mask(args[1]).expand(args[0].shape).sum()))
        if func in _BY_INDEX:
            args = (args[0], [row for i in args[1] for row in self.numbers.indices(i)], *args[2:])
        out = _grouped(func, args, kwargs) if func is aten._grouped_mm.default else func(*args, **kwargs)
        if func is aten.topk.default:
            self.numbers.choose(out[1], args[0].shape[args[3] if len(args) > 3 else -1])
        return out

    def _leaves(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if func is aten.copy_.default:
            return args[0].device.type != "meta"
        device = kwargs.get("device")
        return device is not None and torch.device(device).type != "meta" and args[0].device.type == "meta"

    def _host_copy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Copy a tensor's values to the host. Use ones if the values are unknown."""
        source = args[1] if func is aten.copy_.default else args[0]
        value = self.numbers.value_of(source)
        if value is None:
            value = torch.ones(source.shape, dtype=source.dtype)
        if func is aten.copy_.default:
            return args[0].copy_(value)
        return value.to(kwargs.get("dtype") or source.dtype)


def _grouped(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Multiply expert matrices in bfloat16, the only dtype that `_grouped_mm` supports; keep the input dtype."""
    out = func(
        *(x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args), **kwargs
    )
    return torch.empty_strided(out.shape, out.stride(), dtype=args[0].dtype, device=META)


def _flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the FLOPs of a matrix product or of attention, or 0 for other operations."""
    packet = func.overloadpacket
    if packet in PRODUCTS:
        a, b = args[PRODUCTS[packet]], args[PRODUCTS[packet] + 1]
        return 2 * a.numel() * b.shape[-1]
    if "attention" not in packet.__name__:
        return 0
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=out) if count else 0


def _changed_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    changed: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            changed += [x] if isinstance(x, torch.Tensor) else [y for y in x or () if isinstance(y, torch.Tensor)]
    return changed


_BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
_NO_OPERATION = {aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr}
"""In-place operations that torch cannot run on meta tensors; they are skipped."""
