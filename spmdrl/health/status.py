"""Position of this rank: phase, step and line, for its heartbeat and for the last line of a failed job.

There is one per process. Code that works for long calls `tick()` at times; a change of phase counts as well.
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
"""Parts of names of files whose lines do not show where the program is."""
_STANDARD = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
_OWN = ("spmdrl/health/status.py", "spmdrl/health/flight_record.py")
_DEBUGGERS = ("pdb.py", "bdb.py")
_MAIN = threading.main_thread().ident


@dataclass
class RankStatus:
    """Position and folder of this rank."""

    phase: Callable[[], str] = lambda: ""
    step: int = 0
    """The step in progress, counted from 1; 0 before the first."""
    keeps: bool = False
    """True where a request to leave is heeded before any step, as an evaluation keeps what it has measured."""
    done: int = 0
    """Finished steps, which are in the weights."""
    count: int = 0
    """Goes up with every sign of life of the main thread."""
    beside: int = 0
    """Goes up with signs of life of other threads; a thread that waits for one passes them on."""
    folder: Path | None = None
    """The run folder."""
    saved: Callable[[], int] = lambda: 0
    """The step of the newest checkpoint, 0 for none."""
    job: str = ""
    """Names this start of the run."""

    @property
    def name(self) -> str:
        """The phase in progress, or `start`; `step` between phases."""
        return self.phase() or ("step" if self.step else "start")


rank_status = RankStatus()


def tick() -> None:
    """Gives a sign of life of this thread; takes 0.1 µs."""
    if threading.get_ident() == _MAIN:
        rank_status.count += 1
    else:
        rank_status.beside += 1


def _frames() -> Iterator[FrameType]:
    """Frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short(path: str, line: int) -> str:
    """A frame in short: `folder/file.py:12`."""
    return f"{'/'.join(path.replace(os.sep, '/').split('/')[-2:])}:{line}"


def telling(path: str) -> bool:
    """True for a file that is neither torch's, the standard library's nor a helper that all calls go through."""
    path = path.replace(os.sep, "/")
    return not any(part in path for part in _QUIET) and not path.startswith(_STANDARD)


def place() -> str:
    """file:line of the main thread's innermost `telling` frame, `?` where there is none."""
    for frame in _frames():
        if telling(frame.f_code.co_filename):
            return short(frame.f_code.co_filename, frame.f_lineno)
    return "?"


def stack(error: BaseException | None = None) -> list[str]:
    """Frames of an error, or of the main thread, innermost first: `folder/file.py:12 function`."""
    if error is not None:
        found = [(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))]
    else:
        found = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _frames()]
        found = list(dropwhile(lambda frame: frame[0].endswith(_OWN), found))
    return [f"{short(path, line)} {name}" for path, line, name in found]


def debugged() -> bool:
    """True where a person has stopped the main thread in a debugger."""
    return any(f.f_code.co_filename.endswith(_DEBUGGERS) for f in _frames())


class Clock:
    """Seconds without a sign of life of the main thread, added up over the looks of another thread.

    Time in which the looking thread did not run either (the job was stopped and continued) counts for little.
    """

    def __init__(self, longest_look: float):
        self.idle, self.longest_look = 0.0, longest_look
        self._seen, self._at = (-1, ""), time.monotonic()

    def look(self) -> float:
        """Returns the seconds without a sign of life at this moment."""
        now, seen = time.monotonic(), (rank_status.count, rank_status.phase())
        if seen != self._seen or debugged():
            self.idle = 0.0
        else:
            self.idle += min(now - self._at, self.longest_look)
        self._seen, self._at = seen, now
        return self.idle
