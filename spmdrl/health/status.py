"""Tracks where this rank is (phase, step, line), for its heartbeat and for the last line of a failed job.

Each process has one `rank_status`. Long-running code reports progress by calling `tick()`. A phase change also counts
as progress.
"""

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import FrameType

_QUIET = ("/torch/", "/spmdrl/spmd/", "/site-packages/", "/spmdrl/tracking/metrics.py", "<frozen")
"""Path fragments of libraries and common helpers, whose frames say little about where the program is."""
_STANDARD = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
_OWN = ("spmdrl/health/status.py", "spmdrl/health/flight_record.py")
_DEBUGGERS = ("pdb.py", "bdb.py")
_MAIN = threading.main_thread().ident


@dataclass
class RankStatus:
    """The activity of this rank (phase, step, progress), and its run folder."""

    phase: Callable[[], str] = lambda: ""
    """Function that returns the current phase, or "" between phases."""
    step: int = 0
    """The current step, starting at 1, or 0 before the first step."""
    keeps_partial: bool = False
    """True if a request to leave is accepted before the first step: an evaluation reports its measurements so far."""
    done: int = 0
    """Number of finished steps, whose updates are in the weights."""
    count: int = 0
    """Number of `tick` calls of the main thread."""
    side_count: int = 0
    """Number of `tick` calls of other threads. While the main thread waits for other threads, it calls `tick` whenever
    this count rises."""
    folder: Path | None = None
    """The run folder."""
    saved: Callable[[], int] = lambda: 0
    """Function that returns the step of the newest checkpoint, or 0 if there is none."""
    job: str = ""
    """Random name of this launch of the run."""

    @property
    def name(self) -> str:
        """The current phase, or `step` between phases, or `start` before the first step."""
        return self.phase() or ("step" if self.step else "start")


rank_status = RankStatus()


def tick() -> None:
    """Report progress of this thread. A call takes 0.1 µs."""
    if threading.get_ident() == _MAIN:
        rank_status.count += 1
    else:
        rank_status.side_count += 1


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short(path: str, line: int) -> str:
    """Return a file and line in short form: `folder/file.py:12`."""
    return f"{'/'.join(path.replace(os.sep, '/').split('/')[-2:])}:{line}"


def is_informative(path: str) -> bool:
    """Return True for a file that shows where the program is, which excludes files of torch, Python and the common
    helpers.
    """
    path = path.replace(os.sep, "/")
    return not any(part in path for part in _QUIET) and not path.startswith(_STANDARD)


def place() -> str:
    """Return the main thread's innermost `is_informative` frame as file:line, or `?` if there is none."""
    for frame in _frames():
        if is_informative(frame.f_code.co_filename):
            return short(frame.f_code.co_filename, frame.f_lineno)
    return "?"


def stack(error: BaseException | None = None) -> list[str]:
    """Return the frames of an error, or of the main thread, innermost first: `folder/file.py:12 function`."""
    if error is not None:
        found = [(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))]
    else:
        found = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _frames()]
        found = list(dropwhile(lambda frame: frame[0].endswith(_OWN), found))
    return [f"{short(path, line)} {name}" for path, line, name in found]


class IdleClock:
    """Measures for how many seconds the main thread has made no progress. Another thread calls `look` regularly.

    Time between two calls counts at most `longest_look` seconds, because the process may have been stopped.
    """

    def __init__(self, longest_look: float):
        self.idle, self.longest_look = 0.0, longest_look
        self._seen, self._at = (-1, ""), time.monotonic()

    def look(self) -> float:
        """Return the seconds without progress up to now."""
        now, seen = time.monotonic(), (rank_status.count, rank_status.phase())
        in_debugger = any(frame.f_code.co_filename.endswith(_DEBUGGERS) for frame in _frames())
        if seen != self._seen or in_debugger:
            self.idle = 0.0
        else:
            self.idle += min(now - self._at, self.longest_look)
        self._seen, self._at = seen, now
        return self.idle
