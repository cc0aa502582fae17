"""Checks the folder for checkpoints: write speed, room and locks."""

import errno
import fcntl
import multiprocessing
import os
import secrets
import shutil
import time
from pathlib import Path

from spmdrl.tools.doctor_findings import Finding, ok, warn

MIB = 1 << 20
SLOW = 100.0
"""MB/s below which a checkpoint of a large model takes many minutes."""
LITTLE = 20 << 30
"""Bytes of free space below which the next checkpoints may find the disk full."""


class FolderError(ValueError):
    """Says that a folder or file that was asked for cannot be written."""


def nearest(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists.

    Raises:
        FolderError: something on the path is no folder, or it cannot be written.
    """
    at = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not at.is_dir():
        raise FolderError(f"{folder}: {at} is no folder")
    if not os.access(at, os.W_OK | os.X_OK):
        raise FolderError(f"{folder}: {at} cannot be written by this user")
    return at


def folder(place: Path, mib: int) -> list[Finding]:
    """Writes a file of so many MiB in a folder, flushes it to the disk, and tries a lock. Leaves nothing behind.

    Raises:
        FolderError: the folder cannot be written.
    """
    at = nearest(place)
    file = at / f".doctor-{secrets.token_hex(6)}"
    try:
        data = os.urandom(MIB)
        began = time.perf_counter()
        with open(file, "wb") as out:
            for _ in range(mib):
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        speed = mib * MIB / 1e6 / (time.perf_counter() - began)
        locks = lock(file)
    except OSError as error:
        raise FolderError(f"{place}: nothing can be written in {at}: {error.strerror or error}") from error
    finally:
        file.unlink(missing_ok=True)
    said = f"{at}: {speed:.0f} MB/s for {mib} MiB with fsync"
    found = [ok("disk", said)]
    if speed < SLOW:
        found = [warn("disk", said, "put --run.dir on a faster file system: a rank waits while its share is written")]
    free = shutil.disk_usage(at).free
    said = f"{free / (1 << 30):.1f} GiB free"
    if free < LITTLE:
        found.append(warn("room", said, "free some, lower --checkpoint.keep, or choose another --run.dir"))
    else:
        found.append(ok("room", said))
    return [*found, locks]


def lock(file: Path) -> Finding:
    """Locks a file here and tries it from another process, as two jobs in one run folder would."""
    fix = "mount it with locks (Lustre: -o flock); without them two jobs in one run folder are noticed late"
    with open(file, "r+b") as mine:
        try:
            fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return warn("locks", f"the file system has none ({error.strerror})", fix)
        child = multiprocessing.get_context("fork").Process(target=_try, args=(str(file),))
        child.start()
        child.join(10)
        if child.is_alive():
            child.kill()
            return warn("locks", "a second process waits for a lock that it should be refused", fix)
        if child.exitcode:
            return warn("locks", "a lock does not keep a second process out", fix)
    return ok("locks", "a lock keeps a second process out")


def _try(file: str) -> None:
    """Ends with 0 where the lock is refused because another process has it."""
    with open(file, "r+b") as theirs:
        try:
            fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os._exit(0 if error.errno in (errno.EACCES, errno.EAGAIN) else 1)
    os._exit(1)
