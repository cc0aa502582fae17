"""Counts the growth of files as progress, while a library writes for minutes without calling `tick`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmdrl.health.status import rank_status

EVERY = 3.0
"""Seconds between two measurements."""


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder. Files that appear or vanish meanwhile may be counted or not."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


@contextmanager
def growth_is_progress(folder: Path) -> Iterator[None]:
    """Inside this context count every change in the size of `folder` as progress of this thread.

    If the file system hangs, the measurement hangs too, and progress stops.
    """
    field = "count" if threading.current_thread() is threading.main_thread() else "beside"
    ended = threading.Event()

    def measure() -> None:
        before = 0
        while not ended.wait(EVERY):
            found = size_of(folder)
            if found != before:
                setattr(rank_status, field, getattr(rank_status, field) + 1)
            before = found

    threading.Thread(target=measure, daemon=True, name="growth").start()
    try:
        yield
    finally:
        ended.set()
