"""Where this rank is at this moment: what a heartbeat tells the others, and the last line of a failed job.

One per process. Whoever works for long calls `alive()` now and then; a change of phase counts as well.
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
"""Parts of file names that tell nothing of where the program is."""
_STANDARD = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
_OWN = ("spmdrl/health/status.py", "spmdrl/health/flight_record.py")
_DEBUGGERS = ("pdb.py", "bdb.py")
_MAIN = threading.main_thread().ident


@dataclass
class Here:
    """What a rank knows of itself."""

    phase: Callable[[], str] = lambda: ""
    step: int = 0
    """The step in course, counted from 1; 0 before the first."""
    done: int = 0
    """Steps that are in the weights and came to their end."""
    count: int = 0
    """Goes up with every sign of life of the main thread."""
    beside: int = 0
    """Goes up with those of other threads: who waits for one passes them on."""
    folder: Path | None = None
    """The run folder."""
    saved: Callable[[], int] = lambda: 0
    """The step of the newest checkpoint, 0 for none."""
    job: str = ""
    """Names this start of the run."""

    @property
    def name(self) -> str:
        """The phase in course, or `start`; `step` between phases."""
        return self.phase() or ("step" if self.step else "start")


here = Here()


def alive() -> None:
    """A sign of life of this thread: 0.1 µs."""
    if threading.get_ident() == _MAIN:
        here.count += 1
    else:
        here.beside += 1


def _frames() -> Iterator[FrameType]:
    """The main thread's, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short(path: str, line: int) -> str:
    """`folder/file.py:12`."""
    return f"{'/'.join(path.replace(os.sep, '/').split('/')[-2:])}:{line}"


def telling(path: str) -> bool:
    """A file that is neither torch's, the standard library's nor a helper that everybody goes through."""
    path = path.replace(os.sep, "/")
    return not any(part in path for part in _QUIET) and not path.startswith(_STANDARD)


def place() -> str:
    """file:line of the main thread's innermost frame that tells something, `?` where none does."""
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
    """A person sits in front of the main thread."""
    return any(f.f_code.co_filename.endswith(_DEBUGGERS) for f in _frames())


class Clock:
    """Seconds that the main thread has shown no sign of life, as far as somebody looked.

    Time in which the looking thread did not run either (the job was stopped and continued) counts for little.
    """

    def __init__(self, longest_look: float):
        self.idle, self.longest_look = 0.0, longest_look
        self._seen, self._at = (-1, ""), time.monotonic()

    def look(self) -> float:
        """Seconds without a sign, as of now."""
        now, seen = time.monotonic(), (here.count, here.phase())
        if seen != self._seen or debugged():
            self.idle = 0.0
        else:
            self.idle += min(now - self._at, self.longest_look)
        self._seen, self._at = seen, now
        return self.idle
