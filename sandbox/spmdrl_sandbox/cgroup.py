"""A cgroup for each sandbox, where cgroup v2 lets this user make one: a bound on all of its processes together.

The watcher and the limits of single processes end programs first (`inside/watch.py`, `inside/isolate.py`); the kernel's
own bound has no moment between two looks. It is made in this process's own cgroup or beside it, never further up, where
a job would leave its limits, and only if memory or pids are handed on there already: nothing of the cgroups that exist
is changed. Whatever fails leaves a sandbox without. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NAME = "spmdrl-sandbox-"
SPARE_MIB = 256
"""Memory beyond a program's own and its files': of the sandbox's processes, and what the kernel holds for them."""
SPARE_TASKS = 64
"""Processes and threads beyond a program's own."""
END_SECONDS = 1.0
"""Longest that the end of its processes is waited for."""
_JOIN = '{ echo 0 >"$0/cgroup.procs"; } 2>/dev/null; exec "$@"'
_numbers = itertools.count()


class Group:
    """A cgroup that was made for one sandbox."""

    def __init__(self, folder: Path):
        """folder: of the cgroup."""
        self.folder = folder

    def words(self, command: list[str]) -> list[str]:
        """Return the words that start a command in it: a process that joined later could have children elsewhere."""
        return ["sh", "-c", _JOIN, str(self.folder), *command]

    def limit(self, limits: dict[str, Any]) -> None:
        """Bound it for the next program. limits: fields of `Limits`."""
        memory = limits["memory_mib"] + limits["tmp_mib"] + SPARE_MIB
        for name, value in (
            ("memory.max", memory << 20),
            ("memory.swap.max", 0),
            ("pids.max", limits["processes"] + SPARE_TASKS),
        ):
            _write(self.folder / name, value)

    def close(self) -> None:
        """End what runs in it and remove it. May be called twice."""
        _write(self.folder / "cgroup.kill", 1)
        until = time.monotonic() + END_SECONDS
        while not _removed(self.folder) and time.monotonic() < until:
            time.sleep(0.005)


def make() -> Group | None:
    """Return a cgroup of this process's making, or None where none can be made."""
    try:
        path = next(line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::/"))
        own = ROOT / path.lstrip("/")
        for place in (own, own.parent) if own != ROOT else (own,):
            if {"memory", "pids"} & set((place / "cgroup.subtree_control").read_text().split()):
                return _made(place)
    except (OSError, StopIteration):
        pass
    return None


def _made(place: Path) -> Group:
    for left in place.glob(f"{NAME}*"):
        # The group of a caller that was killed.
        pid = left.name.removeprefix(NAME).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _removed(left)
    folder = place / f"{NAME}{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    return Group(folder)


def _write(file: Path, value: int) -> None:
    """Write a value into a file of the kernel, if it is there: files of some controllers may be missing."""
    with contextlib.suppress(OSError):
        # The file is never created here, and some files are write-only.
        end = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(end, f"{value}\n".encode())
        finally:
            os.close(end)


def _removed(folder: Path) -> bool:
    """Remove an empty cgroup; False while there is a process in it."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True
