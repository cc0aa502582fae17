"""Libraries that write for minutes give no sign of life; the files that they write do."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmdrl.health.status import here

EVERY = 3.0
"""Seconds between two looks."""


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; of those that come and go meanwhile as it happens."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


@contextmanager
def growth_counts(folder: Path) -> Iterator[None]:
    """Inside, this thread shows signs of life as long as the files in `folder` change in size.

    Where the file system hangs, so does who looks, and there are no more signs.
    """
    field = "count" if threading.current_thread() is threading.main_thread() else "beside"
    ended = threading.Event()

    def look() -> None:
        before = 0
        while not ended.wait(EVERY):
            found = size_of(folder)
            if found != before:
                setattr(here, field, getattr(here, field) + 1)
            before = found

    threading.Thread(target=look, daemon=True, name="growth").start()
    try:
        yield
    finally:
        ended.set()
