"""One job at a time in a run folder: rank 0 holds a lock on RUN/.lock, in which it says who it is.

The lock is POSIX's (`fcntl`), not BSD's: it belongs to the process and not to the open file, so a forked child that
outlives a killed rank does not keep it, and on NFS it holds between machines. The kernel releases it when the process
ends, however that ends. On a file system without locks, the file's content still tells a job that another one has
come. No communication.
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
"""Most bytes that are read of the file."""


class InUseError(ValueError):
    """Another job writes to this run folder."""


class TakenError(ValueError):
    """Another job has taken over the run folder of this one."""


@dataclass
class Lock:
    """A run folder that this process writes to."""

    folder: Path
    handle: int
    """The only open handle of this process on the lock file: closing a second one would release the lock."""
    warning: str = ""
    """Reason why the folder is not locked; empty where it is."""
    told: dict = field(default_factory=dict)
    """Content of the file: first that of the job before, then that of this one."""

    def sign(self, agents: Collection[str]) -> None:
        """Records in the file the job that holds the folder. agents: `launcher()` of all ranks and earlier attempts."""
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
        """Reason why this job must not write to the folder any more; empty where it may, or where none can be seen."""
        path = self.folder / NAME
        try:
            mine, there = os.fstat(self.handle), os.stat(path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                told = _read(self.handle)
            else:
                # Some file systems renumber a file now and then, so its content decides.
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
        """Releases the lock."""
        os.close(self.handle)

    def _lock(self) -> bool:
        """Takes the lock on an open file; returns False where another process has it."""
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
"""Locks of this process: one, once its run folder is taken."""


def take(folder: Path, wait: float = WAIT) -> Lock:
    """Locks a run folder, which exists.

    wait: seconds for which another process may hold it.

    Raises:
        InUseError: another process still holds it; says which one, and what to do.
        OSError: the lock file cannot be made.
    """
    until = time.monotonic() + wait
    while True:
        lock = Lock(folder, os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        locked, lock.told = lock._lock(), _read(lock.handle)
        with suppress(FileNotFoundError):
            # The job that had the lock may have moved the folder away, or removed the file.
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
    """Returns `Lock.problem` of the lock that this process holds."""
    return held[0].problem() if held else ""


def who(told: dict) -> str:
    """Names the job of a lock file in words: `process 12 on node7 (since 2026-01-31 10:00:00)`."""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        since = datetime.fromtimestamp(told["since"]).isoformat(" ", "seconds")
        return f"process {told['pid']} on {told['host']} (since {since})"
    return "another process"


def _read(handle: int) -> dict:
    """Content of the lock file; a file that `sign` did not write counts as empty."""
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(os.pread(handle, LONGEST, 0))
        return told if isinstance(told, dict) else {}
    return {}


# ── which job ────────────────────────────────────────────────────────────────


def launcher() -> str:
    """Names the torchrun that started this process, and no other one; empty without torchrun.

    It lives on when ranks are started again. Its environment variables are of less use: a run id may be any number, or
    "none", in every job, and the count of restarts does not change on a node where no rank failed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    pid, started = os.getppid(), ""
    with suppress(OSError, ValueError, IndexError):
        # A script may run between torchrun and this process; torchrun itself began without that variable.
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
    """True where the job that wrote `told` is the one of these agents, started again by torchrun or by SLURM."""
    again = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    job = os.environ.get("SLURM_JOB_ID", "")
    return bool(agents_of(told).intersection(agents)) or (again and job != "" and told.get("slurm") == job)


def agents_of(told: dict) -> set[str]:
    """`launcher()` of all ranks of the job that wrote the file."""
    agents = told.get("agents")
    return {agent for agent in agents if isinstance(agent, str)} if isinstance(agents, list) else set()
