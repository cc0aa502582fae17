"""Room on the disk: checked before a checkpoint is written, and reported when it ran out."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = ("No space left", "Disk quota exceeded", "File too large")


class DiskFullError(ValueError):
    """Error for no room for a checkpoint; the message says how much is wanted, where, and what to do."""


def check_room(root: Path, wanted: int) -> None:
    """Checks that the disk has room for so many bytes.

    Raises:
        DiskFullError: there is less.
    """
    at = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(at).free
    if free < wanted:
        raise DiskFullError(
            f"a checkpoint takes {size(wanted)} and {at} has {size(free)} free: free some, lower --checkpoint.keep "
            "or --checkpoint.keep-every, or choose another --run.dir"
        )


@contextmanager
def told_when_full(root: Path, step: int) -> Iterator[None]:
    """Turns an error caused by a full disk, from any library, into one that says what to do."""
    try:
        yield
    except BaseException as error:
        # The error of torch.distributed.checkpoint is no Exception.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if isinstance(error, DiskFullError) or not (full or any(words in str(error) for words in FULL)):
            raise
        free = "unknown"
        with suppress(OSError):
            free = size(shutil.disk_usage(root).free)
        what = next((words for words in FULL if words in str(error)), str(error))
        raise DiskFullError(
            f"checkpoint step_{step} could not be written to {root}: {what} ({free} free). Those before it are as they "
            "were. Free some, lower --checkpoint.keep or --checkpoint.keep-every, or choose another --run.dir"
        ) from error


def size(n: float) -> str:
    """Formats bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
