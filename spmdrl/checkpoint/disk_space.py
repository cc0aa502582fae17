"""Checks free disk space before a checkpoint is written, and reports a full disk with advice."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = ("No space left", "Disk quota exceeded", "File too large")


class DiskFullError(ValueError):
    """The disk is too full for a checkpoint; the message has sizes, folder and advice."""


def check_free_space(root: Path, needed: int) -> None:
    """Raise DiskFullError if the disk has less than `needed` bytes free."""
    at = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(at).free
    if free < needed:
        raise DiskFullError(
            f"a checkpoint takes {size(needed)} and {at} has {size(free)} free: free some, lower --checkpoint.keep "
            "or --checkpoint.keep-every, or choose another --run.dir"
        )


@contextmanager
def explain_full_disk(root: Path, step: int) -> Iterator[None]:
    """Turn an error of any library that a full disk causes into a DiskFullError with advice."""
    try:
        yield
    except BaseException as error:
        # torch.distributed.checkpoint raises a BaseException.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if isinstance(error, DiskFullError) or not (full or any(words in str(error) for words in FULL)):
            raise
        free = "unknown"
        with suppress(OSError):
            free = size(shutil.disk_usage(root).free)
        what = next((words for words in FULL if words in str(error)), str(error))
        raise DiskFullError(
            f"checkpoint step_{step} could not be written to {root}: {what} ({free} free). Earlier checkpoints are as "
            "they were. Free some, lower --checkpoint.keep or --checkpoint.keep-every, or choose another --run.dir"
        ) from error


def size(n: float) -> str:
    """Format a number of bytes: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
