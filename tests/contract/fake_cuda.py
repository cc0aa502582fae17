"""A GPU that is a label: tensors live in host memory, compute real values, and say that they are on `cuda:0`.

Inside `FakeCuda()` every storage carries the name of the device on which it would be. Python sees it wherever the
program asks (`tensor.device`, `is_cuda`, `storage.device`), so branches for GPUs run; results get the label of what
they were computed from, and an operation over both kinds is refused as CUDA refuses it. torch itself computes on the
CPU and never asks, so autograd, views, parameters, FSDP2 and gloo work as they do there.

It proves: that a GPU branch runs to its end in Python; that tensors meet on one device, in forward and backward; that
what is computed equals the CPU's; that collectives of host groups get host tensors and the others get the device's;
that pinned memory is read, and memory that is being copied is freed, after somebody waited only (`fake_streams.py`);
that nothing in a short table is asked for under `torch.use_deterministic_algorithms(True)`.

It does not prove: that CUDA has a kernel for the operation and the type, or computes the same; anything of NCCL,
of Triton, of kernels that run beside each other, of the allocator, or of speed. Libraries that look beneath Python
(flash-attn, Transformer Engine, vLLM) cannot run on it. FakeTensorMode knows devices too, but no values, and a CPU
build of torch ends the process at the first fake CUDA operation that needs a gradient.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch

# A mode that sees an operation has torch import this, whose annotations want the real `torch.Generator`.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.utils._device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.contract.fake_labels import (
    CUDA,
    DEVICE,
    FACTORIES,
    HOST,
    LIKE,
    NEW,
    STORAGE_DEVICE,
    HostGenerator,
    factory,
    label_of,
    moved,
    on,
    pinned,
    place,
    seen,
    storage_of,
    to_numpy,
    typed,
)
from tests.contract.fake_streams import Copies, Event, Stream
from tests.contract.fake_waits import DATA, Waits

MAY_MIX = ("aten.copy_", "aten._to_copy", "aten.set_", "aten._local_scalar_dense", "aten.record_stream")
INDEXED = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index")
"""Operations in which a tensor on the device may be indexed by one on the host, but not the other way round."""
STRICT_SCALARS = ("aten.cat", "aten.stack", "aten.gather", "aten.scatter", "aten.index_select", "aten.embedding")
"""Operations that want even a tensor of no dimension on their device."""
WIDE = ("aten.mm.dtype_out", "aten.addmm.dtype_out")
"""Products of narrow matrices into float32, which the CPU does not have."""
NONDETERMINISTIC: dict[str, Any] = {
    "aten.cumsum": lambda args, more: (more.get("dtype") or args[0].dtype).is_floating_point,
    "aten.put": lambda args, more: True,
    "aten.histc": lambda args, more: True,
    "aten.bincount": lambda args, more: len(args) > 1 and args[1] is not None,
    "aten.median.dim": lambda args, more: True,
    "aten.scatter_reduce": lambda args, more: args[4] == "prod",
}
"""Operations that CUDA refuses under `torch.use_deterministic_algorithms(True)` on plain tensors and without a backward
(https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html)."""


class MixedDevicesError(RuntimeError):
    """An operation over tensors of both devices."""


class NondeterministicError(RuntimeError):
    """An operation whose result depends on chance, where the program wants none of these."""


class FakeCuda(TorchDispatchMode):
    """One GPU of one process, from `with` to its end. Threads other than this one see no labels of results."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []
        """Names of the functions of torch.cuda that were called."""
        self.waits = Waits()
        """The calls so far that would make the host wait for a GPU."""
        self.copies = Copies(self.waits)
        self.host_groups: set[str] = set()
        self.collectives: list[tuple[str, str]] = []
        """Operation and device of the tensors of every collective."""
        self.gathered: set[int] = set()
        """Memory of their tensors. gloo, which stands in for NCCL, copies results to it from buffers of its own."""
        if dist.is_initialized():
            self.host_groups |= {g.group_name for g in dist.distributed_c10d._world.pg_map if g != dist.group.WORLD}

    # ── every operation of torch ─────────────────────────────────────────────

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Checks where the arguments are, runs the operation on the CPU and labels the results."""
        kwargs, name = dict(kwargs or {}), str(func)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            # DTensor asks for shapes.
            return func(*args, **kwargs)
        if any(t not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in types):
            # DTensor and its like come again with the tensors they hold.
            return NotImplemented
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        labels = {place(x) for x in tensors} - {None}
        if func.namespace == "c10d":
            self._collective(name, args, tensors)
        elif len(labels) == 2 and not name.startswith(MAY_MIX):
            self._refuse_mixture(name, args, tensors)
        if "cuda" in labels and torch.are_deterministic_algorithms_enabled():
            _refuse_chance(name, args, kwargs)
        if "cuda" in labels and func.namespace == "aten":
            self.waits.operation(name, args, kwargs)
            self.copies.given += not func.is_view
        copies = name.startswith("aten.copy_")
        for x in tensors if self.copies.waiting and not copies and not func.is_view else ():
            if place(x) == "cpu":
                self.copies.check(x, name)
        if copies and self.copies.give(*args[:2], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)):
            return args[0]
        if copies and storage_of(args[0])._cdata not in self.gathered:
            self.waits.copy(place(args[1]), place(args[0]), False, False)
        out = _wide(*args, **kwargs) if name in WIDE else func(*args, **kwargs)
        known = "cuda" if "cuda" in labels else "cpu" if labels or not _is_factory(func) else None
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = storage_of(x)
                if not hasattr(storage, "_fake") or storage._fake is None:
                    storage._fake = known
        return out

    def _refuse_mixture(self, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
        if name.startswith(INDEXED):
            values = [args[0], *[x for x in args[2:3] if isinstance(x, torch.Tensor) and x.dim()]]
            if all(place(x) in ("cuda", None) for x in values):
                return
        elif not name.startswith(STRICT_SCALARS) and all(place(x) != "cpu" or not x.dim() for x in tensors):
            return
        where = ", ".join(f"{place(x)}{list(x.shape)}" for x in tensors)
        raise MixedDevicesError(f"Expected all tensors to be on the same device: {name}({where})")

    def _collective(self, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
        groups = [dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and _is_group(x)]
        wanted = "cpu" if groups and groups[0].group_name in self.host_groups else "cuda"
        for x in tensors:
            if (place(x) or wanted) != wanted:
                raise MixedDevicesError(f"{name}: a tensor on {place(x)} in a group of {wanted} tensors")
            on(x, wanted)
            self.gathered.add(storage_of(x)._cdata)
        self.collectives.append((name.split(".")[1], wanted))

    # ── what Python sees ─────────────────────────────────────────────────────

    def __enter__(self):
        """Gives torch the GPU."""
        # torch keeps a set of them for `with torch.device(...)`, made when it is first asked for.
        torch.utils._device._device_constructors()
        self.stack = ExitStack()
        for owner, name, value in self._replacements():
            self.stack.enter_context(patch.object(owner, name, value, create=True))
        return super().__enter__()

    def __exit__(self, *error):
        """Takes the GPU away again."""
        super().__exit__(*error)
        self.stack.close()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        tensor, storage = torch.Tensor, torch.UntypedStorage
        yield tensor, "device", property(lambda t: seen(t, DEVICE))
        yield tensor, "is_cuda", property(lambda t: t.device.type == "cuda")
        yield tensor, "is_cpu", property(lambda t: t.device.type == "cpu")
        yield tensor, "get_device", lambda t: -1 if t.device.type == "cpu" else 0
        yield storage, "device", property(lambda s: CUDA if label_of(s) == "cuda" else STORAGE_DEVICE.__get__(s))
        yield tensor, "to", lambda t, *a, **k: self._moved(t, *a, **k)
        yield tensor, "type", typed(tensor.type)
        yield tensor, "cpu", lambda t, *a, **k: self._moved(t, HOST)
        yield tensor, "cuda", lambda t, *a, **k: self._moved(t, CUDA)
        yield tensor, "tolist", self._listed(tensor.tolist)
        yield tensor, "is_pinned", lambda t, *a: getattr(storage_of(t), "_pinned", False)
        yield tensor, "pin_memory", lambda t, *a: t if t.is_pinned() else pinned(t.clone())
        yield tensor, "record_stream", lambda t, stream: None
        yield tensor, "numpy", to_numpy(tensor.numpy)
        yield tensor, "__array__", to_numpy(tensor.__array__)
        for name in FACTORIES:
            yield torch, name, self._made(factory(getattr(torch, name)))
        for name in LIKE:
            yield torch, name, factory(getattr(torch, name), True)
        for name in NEW:
            yield tensor, name, self._made(factory(getattr(tensor, name), True))
        yield torch.version, "cuda", "13.0"
        yield torch, "Generator", HostGenerator
        yield torch._C, "_cuda_getDevice", lambda: 0
        yield torch.cuda.random, "get_rng_state", lambda device=None: torch.get_rng_state()
        yield torch.cuda, "_lazy_init", lambda: None
        yield torch.cuda, "default_generators", (HostGenerator(),)
        for name, value in self._module().items():
            yield torch.cuda, name, self._told(name, value)
        yield dist, "new_group", self._new_group(dist.new_group)
        yield dist.distributed_c10d, "_get_object_coll_device", lambda group=None: self._object_device(group)
        yield torch.cuda.nccl, "version", lambda: (2, 28, 9)
        yield dist, "get_backend", lambda group=None: self._backend(group)
        yield dist, "init_process_group", self._init_group(dist.init_process_group)
        yield dist, "batch_isend_irecv", lambda ops: [_post(op) for op in ops]

    def _moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = moved(tensor, *args, **kwargs)
        if place(out) != place(tensor):
            arguments = [x for x in args if not isinstance(x, torch.Tensor)]
            later = torch._C._nn._parse_to(*arguments, **{k: v for k, v in kwargs.items() if k != "copy"})[2]
            self.waits.copy(place(tensor), place(out), later, tensor.is_pinned())
            if later and place(out) == "cpu":
                # torch makes the copy in pinned memory, and returns before it is done.
                with _disable_current_modes():
                    into = pinned(out).view(out.shape or 1)
                    self.copies.give(into, on(into.clone(), "cuda"), True)
        return out

    def _listed(self, real: Callable) -> Callable:
        def tolist(tensor):
            # A number is read by an operation, which counts.
            if place(tensor) == "cuda" and tensor.dim():
                self.waits.add("tolist")
            self.copies.check(tensor, "tolist")
            return real(tensor)

        return tolist

    def _made(self, make: Callable) -> Callable:
        if make.__name__ not in DATA:
            return make

        @functools.wraps(make)
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            if place(out) == "cuda" and not (args and isinstance(args[0], torch.Tensor) and place(args[0]) == "cuda"):
                self.waits.add("to the device")
            return out

        return made

    def _module(self) -> dict[str, Any]:
        """Functions of torch.cuda, as far as the program and FSDP2 call them."""
        return dict(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            synchronize=self.copies.synchronize,
            empty_cache=lambda: None,
            mem_get_info=lambda device=None: (60 << 30, 80 << 30),
            memory_allocated=lambda device=None: 10 << 30,
            memory_reserved=lambda device=None: 12 << 30,
            max_memory_allocated=lambda device=None: 11 << 30,
            reset_peak_memory_stats=lambda device=None: None,
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            manual_seed=lambda seed: None,
            manual_seed_all=lambda seed: None,
            initial_seed=lambda: 0,
            get_device_capability=lambda device=None: (9, 0),
            Stream=type("Stream", (Stream,), {"copies": self.copies}),
            Event=type("Event", (Event,), {"copies": self.copies}),
            stream=self.copies.stream,
            device=lambda device: nullcontext(),
            current_stream=lambda device=None: self.copies.current,
            default_stream=lambda device=None: self.copies.default,
        )

    def _told(self, name: str, value: Any) -> Any:
        if isinstance(value, type):
            return value

        @functools.wraps(value)
        def called(*args, **kwargs):
            self.calls.append(name)
            return value(*args, **kwargs)

        return called

    def _backend(self, group: Any) -> str:
        return "gloo" if group is not None and group.group_name in self.host_groups else "nccl"

    def _object_device(self, group: Any) -> str:
        return "cpu" if self._backend(group) == "gloo" else "cuda"

    def _init_group(self, make: Callable) -> Callable:
        def init_process_group(backend=None, *args, device_id=None, **kwargs):
            assert backend == "nccl" and device_id == CUDA, "ranks with a GPU are to use it"
            return make("gloo", *args, **kwargs)

        return init_process_group

    def _new_group(self, make: Callable) -> Callable:
        def new_group(*args, backend=None, **kwargs):
            group = make(*args, backend=backend, **kwargs)
            if backend == "gloo" and isinstance(group, dist.ProcessGroup):
                self.host_groups.add(group.group_name)
            return group

        return new_group


def _refuse_chance(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return
    for start, applies in NONDETERMINISTIC.items():
        if name.startswith(start) and applies(args, kwargs):
            raise NondeterministicError(f"{name} does not have a deterministic implementation")


def _wide(*args: Any, out: torch.Tensor, **scale: Any) -> torch.Tensor:
    """Computes `torch.mm` or `torch.addmm` with an `out_dtype`, under cuBLAS' conditions."""
    *added, a, b, dtype = args
    assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16), (a.dtype, b.dtype)
    assert out.dtype == dtype == torch.float32 and not scale, (out.dtype, dtype, scale)
    assert all(x.dtype == dtype for x in added)
    product = a.float() @ b.float()
    return out.copy_(added[0] + product if added else product)


def _is_factory(func: Any) -> bool:
    return not any("Tensor" in str(a.type) for a in func._schema.arguments)


def _is_group(boxed: Any) -> bool:
    return "ProcessGroup" in str(boxed._type())


def _post(op: Any) -> Any:
    return (
        op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
        if op.op is dist.isend
        else op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
    )
