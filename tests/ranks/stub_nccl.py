"""Stands for NCCL where no GPU is: gloo moves the bytes, groups are made and written down as NCCL would make them.

With a device bound to the default group, as a run on GPUs has it, torch splits NCCL communicators off that group's, and
every rank of it takes part in each split. Here torch's own code takes those branches on a group of gloo: the record of
a rank has each split that it enters and each collective that it begins, in order. `nccl_rules.py` judges the records of
all ranks. Not stood for: kernels, streams, NCCL's own time-outs, and communicators that engines make past torch.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl.engines.vllm.start import Overridden
from spmdrl.health import flight_record as flight
from spmdrl.spmd import lockstep

BACKEND = "counted"
"""Backend of groups that have NCCL's on a GPU; groups of `gloo` are on the host there too."""
BOUND = torch.device("cpu", 0)
HERE = ("tests/ranks/stub_nccl.py", "unittest/mock.py", "megatron/core/")
SENDS, RECEIVES = ("send",), ("recv_", "recv_any_source_")


@dataclass(frozen=True)
class Comm:
    """A communicator or group that a rank is a member of."""

    name: str
    ranks: tuple[int, ...]
    kind: str
    """`default`, `split` off it, `own` (made by its members alone), `host`, or `outside` (with other programs)."""


@dataclass(frozen=True)
class Event:
    """One collective, send, receive or split that a rank has begun."""

    comm: str
    op: str
    place: str
    same: tuple = ()
    """Values that are equal on all ranks of the communicator: root, type, number of elements if it is one number."""
    sends: tuple[int, ...] = ()
    """Number of elements for each rank of the communicator, where these may differ."""
    receives: tuple[int, ...] = ()
    peer: int = -1
    """The other rank of a send or receive, by its number in the job."""
    launch: int = 0
    """Number of the launch in this rank's order: those of one `batch_isend_irecv` share it."""
    thread: str = ""
    child: str = ""
    """Group for which a split is entered: its name and backend."""
    members: tuple[int, ...] | None = None
    """Ranks of this rank's communicator after a split; None where it takes part without being a member."""


@dataclass
class Record:
    """Record of one rank."""

    rank: int
    comms: dict[str, Comm] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


def _plain(tensor: torch.Tensor) -> tuple:
    return tensor.numel(), str(tensor.dtype)


def contents(op: str, args: tuple, size: int, me: int) -> dict[str, tuple]:
    """Returns `same`, `sends` and `receives` of a c10d operation by rank `me` of `size` ranks."""
    tensors, nothing = lockstep._tensors(args), (0,) * size
    kind = str(tensors[0].dtype) if tensors else ""
    if op in ("barrier", "monitored_barrier_"):
        return {}
    if op == "alltoall_base_":
        out, given = tensors
        sizes = []
        for tensor, splits in ((given, args[4]), (out, args[3])):
            row = tensor.numel() // max(1, len(tensor)) if splits else 0
            sizes.append(tuple(s * row for s in splits) if splits else (tensor.numel() // size,) * size)
        return {"same": (kind,), "sends": sizes[0], "receives": sizes[1]}
    if op in ("alltoall_", "allgather_", "reduce_scatter_"):
        out, given = (tuple(t.numel() for t in lockstep._tensors([a])) for a in args[:2])
        return {
            "same": (kind,),
            "sends": given * size if op == "allgather_" else given,
            "receives": out * size if op == "reduce_scatter_" else out,
        }
    if op in ("gather_", "scatter_"):
        out, given = (tuple(t.numel() for t in lockstep._tensors([a])) for a in args[:2])
        root = args[3]
        at_root = tuple((given if op == "gather_" else out)[0] if i == root else 0 for i in range(size))
        if op == "gather_":
            return {"same": (kind, root), "sends": at_root, "receives": out or nothing}
        return {"same": (kind, root), "sends": given or nothing, "receives": at_root}
    extra = []
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ReduceOp" in str(arg._type()):
            extra.append(f"reduce {arg.op()}")
    if op in ("broadcast_", "reduce_"):
        extra.append(f"root {args[2] if op == 'broadcast_' else args[3]}")
    return {"same": (*extra, *map(_plain, tensors))}


class Recorder:
    """Notes what this rank does, from `stub_nccl()` on."""

    def __init__(self, paper: bool = False) -> None:
        self.paper = paper
        self.default = c10d._get_default_group()
        self.record = Record(dist.get_rank())
        self.lock, self.launches = threading.Lock(), 0
        self.batch = threading.local()
        self.making = ""
        self.supports_splitting = True
        self._add(self.default.group_name, range(dist.get_world_size()), "default")

    def _add(self, name: str, ranks, kind: str) -> None:
        self.record.comms[name] = Comm(name, tuple(ranks), kind)

    def _note(self, comm: str, op: str, **more: Any) -> None:
        with self.lock:
            batched = getattr(self.batch, "launch", 0)
            self.launches += not batched
            launch = batched or self.launches
            thread = threading.current_thread().name
            self.record.events.append(Event(comm, op, lockstep.call_site(), launch=launch, thread=thread, **more))

    # ── groups ───────────────────────────────────────────────────────────────

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does as NCCL's backend does: this rank takes part in a split and gets nothing."""
        self._note(self.default.group_name, "split", child=self.making)

    def source(self, pg: dist.ProcessGroup) -> "Recorder | None":
        """Replaces torch's `_get_split_source`: this object answers for NCCL's backend."""
        return self if pg.bound_device_id else None

    def create(self, options: Any, _) -> dist.Backend:
        """Makes a backend for one group: gloo's own, counted."""
        ranks, name = tuple(options.global_ranks_in_group), options.group_id
        if not ranks:
            self._add(name, range(options.group_size), "outside")
        elif self.default.bound_device_id:
            self._note(self.default.group_name, "split", child=self.making, members=ranks)
            self._add(name, ranks, "split")
        else:
            self._add(name, ranks, "own")
        if self.paper:
            return FakeProcessGroup._create_internal(options.group_rank, options.group_size, None)
        made = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        made.options.global_ranks_in_group, made.options.group_name = list(ranks), name
        made._set_sequence_number_for_group()
        return made

    def helper(self, make, size, rank, ranks, backend, store, group_name, *args, device_id=None, **more):
        """Wraps torch's `_new_process_group_helper`, which takes no CPU for a bound device."""
        self.making = f"{group_name} ({'NCCL' if backend == BACKEND else 'host'}, ranks {list(ranks)})"
        kind = "fake" if self.paper and backend != BACKEND else backend
        pg, its_store = make(size, rank, ranks, kind, store, group_name, *args, **more)
        if pg is not dist.GroupMember.NON_GROUP_MEMBER:
            if backend == BACKEND and not self.paper:
                # Of unknown backends torch counts no collectives.
                pg._register_backend(BOUND, dist.ProcessGroup.BackendType.GLOO, pg._get_backend(BOUND))
                pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            elif backend != BACKEND:
                self._add(group_name, ranks, "host" if len(ranks) else "outside")
            if device_id:
                pg.bound_device_id = device_id
        return pg, its_store

    def split_group(self, parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
        """Wraps torch's `split_group`, which meshes call: one split gives every rank the group that it is in."""
        assert parent_pg in (None, self.default) and split_ranks
        mine = next((sorted(ranks) for ranks in split_ranks if self.record.rank in ranks), None)
        name = c10d._process_group_name(mine or split_ranks[0], use_hashed_name=True)
        if mine is None:
            self.making = f"{name} (NCCL, ranks {split_ranks[0]})"
            self.perform_nocolor_split(BOUND)
            return None
        store, limit = c10d._world.pg_map[self.default][1], timeout or c10d._get_default_timeout(BACKEND)
        place = mine.index(self.record.rank)
        pg, _ = c10d._new_process_group_helper(
            *(len(mine), place, mine, BACKEND, store, name), timeout=limit, device_id=BOUND, group_desc=group_desc
        )
        c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(mine)}
        return pg

    # ── collectives ──────────────────────────────────────────────────────────

    def begun(self, group: dist.ProcessGroup, op: str, args: tuple) -> None:
        """Notes that a c10d operation is about to run. Groups from before the stub are ignored."""
        comm = self.record.comms.get(group.group_name)
        if comm is None or comm.kind == "outside" or len(comm.ranks) != group.size():
            return
        if op in SENDS + RECEIVES:
            peer = -1 if op == "recv_any_source_" else comm.ranks[args[2]]
            self._note(comm.name, op, peer=peer, same=tuple(map(_plain, args[0])))
        else:
            self._note(comm.name, op, **contents(op, args, group.size(), group.rank()))

    def batched(self, batch, operations):
        """Wraps `dist.batch_isend_irecv`: NCCL launches all of these as one."""
        with self.lock:
            self.launches += 1
            self.batch.launch = self.launches
        try:
            return batch(operations)
        finally:
            self.batch.launch = 0

    def in_thread(self, run, thread) -> None:
        """Wraps `Thread.run`: dispatch modes belong to one thread."""
        with _Watch(self):
            run(thread)


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            group = lockstep._group_of(args)
            if group is not None:
                self.recorder.begun(group, func._opname, args)
        return func(*args, **(kwargs or {}))


def _method(function, inner):
    """Makes a function that takes the place of a method, with `inner` before its arguments."""
    return lambda *args, **kwargs: function(inner, *args, **kwargs)


@contextmanager
def stub_nccl(paper: bool = False) -> Iterator[Recorder]:
    """Makes gloo's default group behave as one of NCCL with a bound device, inside the context and on every rank.

    paper: the default group is torch's `fake`, on which one process can be any rank of a large job. Nothing moves.
    """
    recorder = Recorder(paper)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, lambda *a: None, extended_api=True, devices=["cpu"])
    # The latest recorder makes groups.
    plugin = dist.Backend._BackendPlugin(recorder.create, True)
    accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: BOUND)
    default, world = recorder.default, c10d._world
    was = world.pg_map[default], world.pg_backend_config[default]
    with ExitStack() as stack:
        for where, name, there in (
            (c10d, "_get_split_source", recorder.source),
            (c10d, "_new_process_group_helper", partial(recorder.helper, c10d._new_process_group_helper)),
            (device_mesh, "split_group", recorder.split_group),
            # Meshes split where there is an accelerator.
            (device_mesh, "torch", Overridden(torch, accelerator=accelerator)),
            (dist, "batch_isend_irecv", partial(recorder.batched, dist.batch_isend_irecv)),
            (threading.Thread, "run", _method(recorder.in_thread, threading.Thread.run)),
            # Direct sends are gloo's: on GPUs FSDP runs its collectives.
            (FSDPModule, "set_custom_all_gather", lambda *a: None),
            (FSDPModule, "set_custom_reduce_scatter", lambda *a: None),
            # It counts as gloo does, whose groups these are.
            (flight, "dist", Overridden(dist, get_backend=lambda group=None: "gloo")),
            (lockstep, "_QUIET", (*lockstep._QUIET, *HERE)),
        ):
            stack.enter_context(patch.object(where, name, there))
        stack.enter_context(patch.dict(dist.Backend._plugins, {BACKEND.upper(): plugin}))
        world.pg_map[default] = BACKEND, was[0][1]
        world.pg_backend_config[default] = str(c10d.BackendConfig(dist.Backend(BACKEND)))
        default.bound_device_id = BOUND
        try:
            with _Watch(recorder):
                yield recorder
        finally:
            world.pg_map[default], world.pg_backend_config[default] = was
            default.bound_device_id = None
