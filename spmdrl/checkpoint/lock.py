"""One job at a time in a run folder: rank 0 holds a lock on RUN/.lock, in which it says who it is.

The lock is POSIX's (`fcntl`), not BSD's: it belongs to the process and not to the open file, so a forked child that
outlives a killed rank does not keep it, and on NFS it holds between machines. The kernel lets go of it when the process
ends, however that ends. Where a file system has no locks, what stands in the file still tells a job that another one
has come. No communication.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

NAME = ".lock"
WAIT = 10.0
"""Seconds for which a job that is ending may still hold its folder."""
HELD = (errno.EACCES, errno.EAGAIN)
LONGEST = 1 << 20
"""Bytes that are read of the file."""


class InUseError(ValueError):
    """Another job writes to this run folder."""


class TakenError(ValueError):
    """The run folder was this job's, and is another's."""


@dataclass
class Lock:
    """A run folder that this process writes to."""

    folder: Path
    handle: int
    """The only one of this process on that file: to close another one would let go of the lock."""
    warning: str = ""
    """Why there is no lock after all."""
    told: dict = field(default_factory=dict)
    """What the file says: first of the job before, then of this one."""

    def sign(self, agents: Collection[str]) -> None:
        """Say in the file who writes here. agents: `launcher()` of all ranks, and of attempts before."""
        self.told = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
            "token": secrets.token_hex(8),
            "slurm": os.environ.get("SLURM_JOB_ID", ""),
            "agents": sorted(agents),
        }
        data = json.dumps(self.told).encode()
        os.pwrite(self.handle, data, 0)
        os.ftruncate(self.handle, len(data))
        os.fsync(self.handle)

    def problem(self) -> str:
        """Why nothing may be written to the folder any more; empty where all is well, or where that cannot be told."""
        path = self.folder / NAME
        try:
            mine, there = os.fstat(self.handle), os.stat(path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                told = _read(self.handle)
            else:
                # Some file systems number a file anew now and then: what stands in it counts.
                other = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    told = _read(other)
                finally:
                    os.close(other)
                    self._lock()
        except OSError:
            return ""
        if not told.get("token") or told["token"] == self.told.get("token"):
            return ""
        lies = self.folder.resolve()
        with suppress(OSError):
            lies = Path(os.readlink(f"/proc/self/fd/{self.handle}")).parent
        moved = f"; what this run saved lies in {lies}" if lies != self.folder.resolve() else ""
        return (
            f"{self.folder} is another job's by now, {who(told)}, and nothing more is written there{moved}. Give each "
            "job a --run.dir of its own"
        )

    def release(self) -> None:
        """Let go."""
        os.close(self.handle)

    def _lock(self) -> bool:
        """False where another process has it."""
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            self.warning = (
                f"{self.folder} is on a file system without locks ({error.strerror}): another job in it is noticed "
                "before a checkpoint is published, and not kept out"
            )
        return True


held: list[Lock] = []
"""What this process holds: one, once its run folder is taken."""


def take(folder: Path, wait: float = WAIT) -> Lock:
    """Lock a run folder, which exists.

    wait: seconds for which another process may hold it.

    Raises:
        InUseError: it still does; says which, and what to do.
        OSError: no file can be made there.
    """
    until = time.monotonic() + wait
    while True:
        lock = Lock(folder, os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        locked, lock.told = lock._lock(), _read(lock.handle)
        with suppress(FileNotFoundError):
            # The one who had it may have moved the folder away, or removed the file.
            there = os.stat(folder / NAME)
            if locked and there.st_ino == os.fstat(lock.handle).st_ino:
                return lock
        lock.release()
        if time.monotonic() > until:
            raise InUseError(
                f"{folder} is in use by {who(lock.told)}, and two jobs in one run folder write over each other: wait "
                f"until that one has ended, or end it, or choose another --run.dir. If it is gone for good (a machine "
                f"that died with its lock), remove {folder / NAME}"
            )
        time.sleep(0.2)


def problem() -> str:
    """`Lock.problem` of what this process holds."""
    return held[0].problem() if held else ""


def who(told: dict) -> str:
    """`process 12 on node7 (since 2026-01-31 10:00:00)`."""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        since = datetime.fromtimestamp(told["since"]).isoformat(" ", "seconds")
        return f"process {told['pid']} on {told['host']} (since {since})"
    return "another process"


def _read(handle: int) -> dict:
    """Anything else than what `sign` writes counts as nothing."""
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(os.pread(handle, LONGEST, 0))
        return told if isinstance(told, dict) else {}
    return {}


# ── which job ────────────────────────────────────────────────────────────────


def launcher() -> str:
    """Names the torchrun that started this process, and no other one; empty without torchrun.

    It lives on when ranks are started again. What it tells them is of less use: a run id may be any number, or "none",
    in every job, and the count of restarts stands still on a node where no rank failed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    pid, started = os.getppid(), ""
    with suppress(OSError, ValueError, IndexError):
        # A script may stand between; torchrun itself began without that variable.
        above = pid
        while above and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{above}/environ").read_bytes():
            above = int(_stat(above)[1])
        pid = above or pid
    with suppress(OSError, ValueError, IndexError):
        started = f"{_stat(pid)[19]}:{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
    return f"{socket.gethostname()}:{pid}:{started}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name: state, parent, ..., time of its start (the 20th)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def same_job(told: dict, agents: Collection[str]) -> bool:
    """The job that wrote `told` is the one that these agents are of, started again by torchrun or by SLURM."""
    again = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    job = os.environ.get("SLURM_JOB_ID", "")
    return bool(agents_of(told).intersection(agents)) or (again and job != "" and told.get("slurm") == job)


def agents_of(told: dict) -> set[str]:
    """`launcher()` of all ranks of a job, as the file says it."""
    agents = told.get("agents")
    return {agent for agent in agents if isinstance(agent, str)} if isinstance(agents, list) else set()
