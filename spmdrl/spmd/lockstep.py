"""Debug mode: ranks compare each collective before they run it, and on a mismatch report what each rank runs.

A dispatch mode intercepts every c10d operation. For the n-th collective of a process group, each rank writes (call
site, operation, shapes) to the rendezvous store, counts the ranks with the same entry, and waits for the verdict of the
last rank to arrive. All entries are read only on a mismatch or if a rank does not arrive. The mode is slow, but needs
no code at call sites, so it also covers collectives inside FSDP.
"""

import hashlib
import sys
import time
from collections import deque

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_QUIET = ("torch/", "spmdrl/spmd/lockstep.py", "contextlib.py", "typing_extensions.py")
"""Path fragments of files whose frames `call_site` skips. `typing_extensions.py` wraps deprecated torch functions."""
_HELPERS = ("spmdrl/spmd/",)
"""Folder of shared helpers that run collectives for many callers, so a line in it does not identify the call site."""


class LockstepError(RuntimeError):
    """Ranks ran different collectives. The message lists the differences."""


def call_site() -> str:
    """Return the innermost non-torch frame as file:line. If it is in `spmd/`, its callers follow: `a:1 < b:2`."""
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
    """Compares all collectives run inside its context, which every rank must enter, but not sends and receives."""

    def __init__(self, store: dist.Store, timeout: float = 60.0):
        """Compare through a store shared by all ranks. timeout: seconds after which a rank counts as missing."""
        super().__init__()
        self.store, self.timeout = store, timeout
        self.counts: dict[str, int] = {}
        self.history: list[str] = []
        self.written: dict[str, deque[list[str]]] = {}
        """Process group -> store keys of its latest collectives, which this rank has to delete."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Compare a collective across ranks, then run it."""
        if func.namespace == "c10d":
            group = _group_of(args)
            # Sends and receives differ between ranks by design, but all other operations must be the same call on every
            # rank.
            if group is not None and group.size() > 1 and func._opname not in ("send", "recv_", "recv_any_source_"):
                self._compare(group, func._opname, [tuple(t.shape) for t in _tensors(args)])
        return func(*args, **(kwargs or {}))

    def _compare(self, group: dist.ProcessGroup, op: str, shapes: list[tuple[int, ...]]) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"lockstep/{'-'.join(map(str, ranks))}/{group.group_name}"
        turn = self.counts[name] = self.counts.get(name, -1) + 1
        # Ragged payloads differ in size by design, and the root of a gather passes more tensors than the other ranks.
        suffix = "" if any(kind in op for kind in ("alltoall", "gather_", "scatter_")) else f" {shapes}"
        entry = f"{call_site()} {op}{suffix}"
        self.history.append(entry)
        me = dist.get_rank()
        here = f"{name}/{turn}"
        self.store.set(f"{here}/{me}", entry)
        alike = f"{here}/alike/{hashlib.blake2b(entry.encode(), digest_size=8).hexdigest()}"
        self.store.add(alike, 1)
        if self.store.add(f"{here}/came", 1) == len(ranks):
            # Every rank counts its entry before it counts itself as arrived, so the entry count is complete here.
            self.store.set(f"{here}/verdict", "alike" if self.store.add(alike, 0) == len(ranks) else "differ")
        if self._read(f"{here}/verdict", self.timeout) != "alike":
            late = f"did not come within {self.timeout:.0f} s"
            lines = [f"  rank {r}: {self._read(f'{here}/{r}', 0.0) or late}" for r in sorted(ranks)]
            raise LockstepError(f"ranks differ at collective {turn} of this group:\n" + "\n".join(lines))
        # Once all ranks have arrived at a collective, they have all read the keys of the previous one.
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
