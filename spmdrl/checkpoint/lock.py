"""Locks a run folder for one job at a time: rank 0 holds a lock on RUN/.lock, whose content identifies the job.

The lock is a POSIX lock (`fcntl`), not a BSD lock. A POSIX lock belongs to the process rather than the open file, so a
forked child that outlives a killed rank does not keep the lock. POSIX locks also work across machines on NFS. The
kernel releases the lock when the process exits. On a file system without locks, a job can still tell from the file's
content that another job has taken the folder. There is no communication between ranks.
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
"""Maximum seconds to wait for a lock that an exiting job may still hold."""
HELD = (errno.EACCES, errno.EAGAIN)
LONGEST = 1 << 20
"""Maximum number of bytes to read from a lock file."""


class InUseError(ValueError):
    """Another job is using this run folder."""


class TakenError(ValueError):
    """Another job has taken over this job's run folder."""


@dataclass
class Lock:
    """A run folder that this process writes to."""

    folder: Path
    handle: int
    """File descriptor of the lock file. The lock is lost if this process closes any other descriptor of the file."""
    warning: str = ""
    """Reason why the folder could not be locked, or empty if it is locked."""
    record: dict = field(default_factory=dict)
    """Content of the lock file, which describes the previous owner before `sign` and this job afterwards."""

    def sign(self, agents: Collection[str]) -> None:
        """Record this job as the owner. agents: `launcher()` of all its ranks, including ranks from before restarts."""
        self.record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
            "token": secrets.token_hex(8),
            "slurm": os.environ.get("SLURM_JOB_ID", ""),
            "agents": sorted(agents),
        }
        data = json.dumps(self.record).encode()
        os.pwrite(self.handle, data, 0)
        os.ftruncate(self.handle, len(data))
        os.fsync(self.handle)

    def problem(self) -> str:
        """Return the reason why this job must no longer write to the folder, or "" if no reason is known."""
        path = self.folder / NAME
        try:
            mine, there = os.fstat(self.handle), os.stat(path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                record = _read(self.handle)
            else:
                # Some file systems occasionally change a file's inode number, so the file's content decides.
                other = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    record = _read(other)
                finally:
                    os.close(other)
                    self._lock()
        except OSError:
            return ""
        if not record.get("token") or record["token"] == self.record.get("token"):
            return ""
        place = self.folder.resolve()
        with suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{self.handle}")).parent
        moved = f"; the files of this run are in {place}" if place != self.folder.resolve() else ""
        return (
            f"{self.folder} was taken by another job, {owner_name(record)}, and this run writes nothing more there"
            f"{moved}. Give each job a different --run.dir"
        )

    def release(self) -> None:
        """Release the lock by closing its file."""
        os.close(self.handle)

    def _lock(self) -> bool:
        """Lock the open file. Returns False if another process holds the lock.

        If the file system has no locks, sets `warning` instead.
        """
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            self.warning = (
                f"{self.folder} is on a file system without locks ({error.strerror}): another job is not kept out of "
                "it, only noticed before a checkpoint is published"
            )
        return True


held: list[Lock] = []
"""Locks held by this process: none at first, and the run folder's lock once this process has taken the folder."""


def take(folder: Path, wait: float = WAIT) -> Lock:
    """Lock an existing run folder.

    wait: maximum seconds to wait for another process to release the lock.

    Raises:
        InUseError: another process still holds the lock. The message names the process and gives advice.
        OSError: the lock file cannot be created.
    """
    until = time.monotonic() + wait
    while True:
        lock = Lock(folder, os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        locked, lock.record = lock._lock(), _read(lock.handle)
        with suppress(FileNotFoundError):
            # The previous job may have moved or removed the file, so the lock is valid only if the file is still there.
            there = os.stat(folder / NAME)
            if locked and there.st_ino == os.fstat(lock.handle).st_ino:
                return lock
        lock.release()
        if time.monotonic() > until:
            raise InUseError(
                f"{folder} is in use by {owner_name(lock.record)}, and two jobs in one run folder would overwrite each "
                "other's files: wait until that one has ended, or end it, or choose another --run.dir. If its machine "
                f"died with the lock, remove {folder / NAME}"
            )
        time.sleep(0.2)


def problem() -> str:
    """Return `Lock.problem` for the lock held by this process, or "" if it holds no lock."""
    return held[0].problem() if held else ""


def owner_name(record: dict) -> str:
    """Return a description of the job that owns a lock file: `process 12 on node7 (since 2026-01-31 10:00:00)`."""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        since = datetime.fromtimestamp(record["since"]).isoformat(" ", "seconds")
        return f"process {record['pid']} on {record['host']} (since {since})"
    return "another process"


def _read(handle: int) -> dict:
    """Return the content of the lock file, or {} if it was not written by `sign`."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(os.pread(handle, LONGEST, 0))
        return record if isinstance(record, dict) else {}
    return {}


# ── recognising a restarted job ─────────────────────────────────────────────────


def launcher() -> str:
    """Return a unique name for the torchrun process that started this process, or "" without torchrun.

    A torchrun process survives restarts of its ranks, so the name identifies a restarted job. torchrun's environment
    variables do not identify a restarted job. Several jobs can share a run id, for example "none", and the restart
    count stays the same on nodes where no rank failed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    pid, started = os.getppid(), ""
    with suppress(OSError, ValueError, IndexError):
        # There may be a script between torchrun and this process: torchrun is the first ancestor without the variable.
        above = pid
        while above and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{above}/environ").read_bytes():
            above = int(_stat(above)[1])
        pid = above or pid
    with suppress(OSError, ValueError, IndexError):
        started = f"{_stat(pid)[19]}:{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
    return f"{socket.gethostname()}:{pid}:{started}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name: state, parent, ..., start time (the 20th)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def same_job(record: dict, agents: Collection[str]) -> bool:
    """Return True if the job that wrote `record` is this job before a restart by torchrun or SLURM."""
    restarted = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    job = os.environ.get("SLURM_JOB_ID", "")
    return bool(agents_of(record).intersection(agents)) or (restarted and job != "" and record.get("slurm") == job)


def agents_of(record: dict) -> set[str]:
    """Return the `launcher()` values of all ranks of the job that wrote `record`."""
    agents = record.get("agents")
    return {agent for agent in agents if isinstance(agent, str)} if isinstance(agents, list) else set()
