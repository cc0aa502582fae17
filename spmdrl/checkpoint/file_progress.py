"""Takes the growth of files for a sign of life, while libraries write for minutes without one."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmdrl.health.status import rank_status

EVERY = 3.0
"""Seconds between two looks."""


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; files that come and go meanwhile may count or not."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


@contextmanager
def growth_counts(folder: Path) -> Iterator[None]:
    """Makes this thread show signs of life inside the context as long as the files in `folder` change in size.

    If the file system hangs, the look hangs too, and the signs stop.
    """
    field = "count" if threading.current_thread() is threading.main_thread() else "beside"
    ended = threading.Event()

    def look() -> None:
        before = 0
        while not ended.wait(EVERY):
            found = size_of(folder)
            if found != before:
                setattr(rank_status, field, getattr(rank_status, field) + 1)
            before = found

    threading.Thread(target=look, daemon=True, name="growth").start()
    try:
        yield
    finally:
        ended.set()
