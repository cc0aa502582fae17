"""Names, hashes and flushes checkpoint files, and checks free disk space. Nothing here is collective."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from spmdrl.health.status import rank_status, tick

FULL_DISK = ("No space left", "Disk quota exceeded", "File too large")
"""Substrings of library error messages that report a full disk."""
MEASURE_EVERY = 3.0
"""Seconds between two measurements of the folder's size by `growth_is_progress`."""


class DiskFullError(ValueError):
    """The disk is too full for a checkpoint. The message says how much is free and what the user can do."""


def file_hash(path: Path) -> str:
    """Return the xxh3_128 hash of a file, in hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(16 << 20):
            state.update(block)
            tick()
    return state.hexdigest()


def flushed_hash(path: Path) -> str:
    """Hash a newly written file, flush it to disk, and return the hash."""
    # Hash before flushing. After flushing, the file would be read from disk, which may return different bytes.
    found = file_hash(path)
    flush(path)
    return found


def flush(path: Path) -> None:
    """Flush a file to disk and drop it from the page cache, so that the next read comes from the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    tick()


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: write it under a temporary name, then rename it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    os.replace(part, path)


def rank_name(rank: int) -> str:
    """Return the name of the file with a rank's part of the run state."""
    return f"rank_{rank:05d}.safetensors"


def rank_files(folder: Path) -> list[Path]:
    """Return the per-rank state files in rank order, to be read with `checkpoint/treefile.py`."""
    return sorted((folder / "state" / "ranks").glob("rank_*.safetensors"))


def check_free_space(root: Path, needed: int) -> None:
    """Raise DiskFullError if fewer than `needed` bytes are free on the disk."""
    at = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(at).free
    if free < needed:
        raise DiskFullError(
            f"a checkpoint takes {byte_text(needed)} and {at} has {byte_text(free)} free: make room, lower "
            "--checkpoint.keep or --checkpoint.keep-every, or choose another --run.dir"
        )


@contextmanager
def explain_full_disk(root: Path, step: int) -> Iterator[None]:
    """Convert any library's error about a full disk into a DiskFullError with advice."""
    try:
        yield
    except BaseException as error:
        # torch.distributed.checkpoint raises a BaseException that is not an Exception.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        words = next((words for words in FULL_DISK if words in str(error)), "")
        if isinstance(error, DiskFullError) or not (full or words):
            raise
        free = "unknown"
        with suppress(OSError):
            free = byte_text(shutil.disk_usage(root).free)
        raise DiskFullError(
            f"checkpoint step_{step} could not be written to {root}: {words or error} ({free} free). Earlier "
            "checkpoints are as they were. Make room, lower --checkpoint.keep or --checkpoint.keep-every, or choose "
            "another --run.dir"
        ) from error


def byte_text(n: float) -> str:
    """Format a number of bytes: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


@contextmanager
def growth_is_progress(folder: Path) -> Iterator[None]:
    """Count every change in the size of `folder` as progress of this thread, like `health.status.tick`.

    Libraries can write for minutes without calling `tick`, which would make the rank look stuck. If the file system
    hangs, the measurement hangs too, so the rank correctly looks stuck.
    """
    field = "count" if threading.current_thread() is threading.main_thread() else "side_count"
    ended = threading.Event()

    def measure() -> None:
        before = 0
        while not ended.wait(MEASURE_EVERY):
            found = _folder_bytes(folder)
            if found != before:
                setattr(rank_status, field, getattr(rank_status, field) + 1)
            before = found

    threading.Thread(target=measure, daemon=True, name="growth").start()
    try:
        yield
    finally:
        ended.set()


def _folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes. Files that vanish while the sizes are added up count as
    0.
    """
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
