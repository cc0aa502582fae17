"""Debug mode: before each collective the ranks compare it, and an error names the rank that is about to run another.

Every c10d operation is intercepted by a dispatch mode. The rank writes (call site, operation, shapes) for its n-th
collective of that group to the rendezvous store, counts those who wrote the same, and waits for the verdict of the rank
that comes last. Only where they differ, or a rank does not come, are all entries read. Slow, and it needs no code at
the call sites: a collective inside FSDP is seen as well.
"""

import hashlib
import sys
import time
from collections import deque
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_QUIET = ("torch/", "spmdrl/spmd/lockstep.py", "contextlib.py", "typing_extensions.py")
"""Files whose frames are passed over; the last wraps what torch has deprecated."""
_HELPERS = ("spmdrl/spmd/",)
"""Files through which all collectives run, so their lines alone do not tell call sites apart."""


class LockstepError(RuntimeError):
    """Ranks went different ways; the message has each one's file, line, operation and shapes."""


def call_site() -> str:
    """file:line of the innermost frame that is not torch's, and its callers' behind helpers of `spmd/`: `a:1 < b:2`."""
    frame, places = sys._getframe(1), []
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if not any(part in name for part in _QUIET):
            places.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}")
            if not any(part in name for part in _HELPERS):
                break
        frame = frame.f_back
    return " < ".join(places) or "?"


def _tensors(args) -> list[torch.Tensor]:
    out = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            out.append(arg)
        elif isinstance(arg, (list, tuple)):
            out += _tensors(arg)
    return out


def _group_of(args) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue
    return None


class Lockstep(TorchDispatchMode):
    """Use as a context manager around the program of every rank.

    Args:
        store: rendezvous store, shared by all ranks.
        timeout: seconds to wait for another rank's entry before it is named as missing.
    """

    def __init__(self, store: dist.Store, timeout: float = 60.0):
        super().__init__()
        self.store, self.timeout = store, timeout
        self.counts: dict[str, int] = {}
        self.history: list[str] = []
        self.written: dict[str, deque[list[str]]] = {}
        """Keys of the last turns of each group that this rank deletes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Compare, then run."""
        if func.namespace == "c10d":
            group = _group_of(args)
            # Point-to-point pairs differ by design; the rest is the same call on every rank.
            if group is not None and group.size() > 1 and func._opname not in ("send", "recv_", "recv_any_source_"):
                self._compare(group, func._opname, [tuple(t.shape) for t in _tensors(args)])
        return func(*args, **(kwargs or {}))

    def _compare(self, group: dist.ProcessGroup, op: str, shapes: list[tuple[int, ...]]) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"lockstep/{'-'.join(map(str, ranks))}/{group.group_name}"
        turn = self.counts[name] = self.counts.get(name, -1) + 1
        # Ragged payloads differ in size by design, and the root of a gather passes more tensors than the others.
        shown = "" if any(kind in op for kind in ("alltoall", "gather_", "scatter_")) else f" {shapes}"
        entry = f"{call_site()} {op}{shown}"
        self.history.append(entry)
        me = dist.get_rank()
        here = f"{name}/{turn}"
        self.store.set(f"{here}/{me}", entry)
        alike = f"{here}/alike/{hashlib.blake2b(entry.encode(), digest_size=8).hexdigest()}"
        self.store.add(alike, 1)
        if self.store.add(f"{here}/came", 1) == len(ranks):
            # All have counted themselves before they came.
            self.store.set(f"{here}/verdict", "alike" if self.store.add(alike, 0) == len(ranks) else "differ")
        if self._read(f"{here}/verdict", self.timeout) != "alike":
            late = f"did not come within {self.timeout:.0f} s"
            lines = [f"  rank {r}: {self._read(f'{here}/{r}', 0.0) or late}" for r in sorted(ranks)]
            raise LockstepError(f"ranks differ at collective {turn} of this group:\n" + "\n".join(lines))
        # All ranks have read a turn once all have come to the next one.
        old = self.written.setdefault(name, deque())
        old.append([f"{here}/{me}"])
        if me == ranks[0]:
            old[-1] += [alike, f"{here}/came", f"{here}/verdict"]
        for key in old.popleft() if len(old) > 2 else []:
            self.store.delete_key(key)

    def _read(self, key: str, wait: float) -> str | None:
        end = time.monotonic() + wait
        while not self.store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.0005)
        return self.store.get(key).decode()


def lockstep(enabled: bool, store: dist.Store, timeout: float) -> AbstractContextManager:
    """The recorder where it is on, else a context that does nothing."""
    from contextlib import nullcontext

    return Lockstep(store, timeout) if enabled else nullcontext()
