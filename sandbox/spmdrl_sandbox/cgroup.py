"""Uses a cgroup to limit all processes of a sandbox together, if cgroup v2 lets this user create one.

Normally the watcher (`inside/watch.py`) or a per-process limit (`inside/isolate.py`) ends a program first. The cgroup
also limits programs between two checks of the watcher. The cgroup is created as a child or sibling of this process's
own cgroup, but not further up, where the job's limits would not apply. The parent cgroup must already have the memory
or pids controller enabled, because existing cgroups are not changed. The sandbox also works without a cgroup.
Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
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
"""MiB that a cgroup allows beyond a program's memory and files, for the sandbox itself and the kernel."""
SPARE_TASKS = 64
"""Number of processes and threads that a cgroup allows beyond a program's limit, for the sandbox itself."""
END_SECONDS = 1.0
"""Maximum seconds to wait until killed processes have ended."""
_JOIN = '{ echo 0 >"$0/cgroup.procs"; } 2>/dev/null; exec "$@"'
_numbers = itertools.count()


class Group:
    """A cgroup created for one sandbox."""

    def __init__(self, folder: Path):
        """Create the object. folder: existing folder of the cgroup."""
        self.folder = folder

    def words(self, command: list[str]) -> list[str]:
        """Return the words of a command that joins the cgroup before it executes `command`.

        If a process joined later, children that it already has would stay outside the cgroup.
        """
        return ["sh", "-c", _JOIN, str(self.folder), *command]

    def limit(self, limits: dict[str, Any]) -> None:
        """Set the limits of the cgroup for the next program. limits: fields of `Limits`."""
        memory = limits["memory_mib"] + limits["tmp_mib"] + SPARE_MIB
        for name, value in (
            ("memory.max", memory << 20),
            ("memory.swap.max", 0),
            ("pids.max", limits["processes"] + SPARE_TASKS),
        ):
            _write(self.folder / name, value)

    def close(self) -> None:
        """Kill all processes of the cgroup and remove it. May be called twice."""
        _write(self.folder / "cgroup.kill", 1)
        until = time.monotonic() + END_SECONDS
        while not _removed(self.folder) and time.monotonic() < until:
            time.sleep(0.005)


def make() -> Group | None:
    """Create a cgroup for a sandbox and return it, or return None if no cgroup can be created."""
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
        # Remove cgroups left by callers that were killed.
        pid = left.name.removeprefix(NAME).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _removed(left)
    folder = place / f"{NAME}{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    return Group(folder)


def _write(file: Path, value: int) -> None:
    """Write a value to a cgroup file. Ignore errors, because the file is missing if its controller is disabled."""
    with contextlib.suppress(OSError):
        # Python's `open` would try to create a missing file, or to read a write-only one.
        end = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(end, f"{value}\n".encode())
        finally:
            os.close(end)


def _removed(folder: Path) -> bool:
    """Remove an empty cgroup. Return False if it still has processes."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True
