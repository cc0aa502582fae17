"""The processes of a pool, which starts them, exchanges JSON lines with them, watches deadlines, and replaces them.

A process first sends `{"ready": true}`. `{"loading": true}` and `{"loading": false}` enclose the loading of a file,
which counts to no answer's time. `{"alive": true}` is a sign of life. All other lines are for the pool.
"""

import json
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from spmdrl.health.status import tick
from spmdrl.workers.child import LEAVES_WITHIN, Child, spawn

START_SECONDS = 120.0
"""Longest a process may take to start, or to import a user's file (a cold file system is slow)."""
LOOK_EVERY = 0.05
"""Seconds between two looks at all deadlines by a caller that does not wait, which may come between two steps of an
engine with hundreds of requests under way."""


@dataclass(eq=False)
class Process(Child):
    """A process of a pool."""

    retired: bool = False
    """True: it ends with its requests under way, and no other takes its place."""
    silent: float | None = None
    """Time at which nothing was read from it after its deadline; None once it sent anything (time.monotonic())."""


P = TypeVar("P", bound=Process)


class Listener(Protocol):
    """The pool, as its processes call it."""

    def on_message(self, process: Any, message: dict[str, Any], /) -> None:
        """Handle a line of a process."""
        ...

    def deadline(self, process: Any, /) -> float:
        """Return the time at which a process should have answered (time.monotonic())."""
        ...

    def on_timeout(self, process: Any, /) -> None:
        """Replace a process that is silent after its deadline, or does not start."""
        ...

    def on_exit(self, process: Any, how: str, /) -> None:
        """Replace a process that ended by itself."""
        ...


class Processes(Generic[P]):
    """A fixed number of processes."""

    def __init__(
        self,
        count: int,
        kind: type[P],
        module: str,
        hello: dict[str, Any],
        listener: Listener,
        grace: float = 0.0,
        variables: dict[str, str] | None = None,
        python: str = "",
    ):
        """Start them, without waiting for them.

        kind, module, hello, variables, python: as in `spawn`. grace: seconds that a process may be silent after its
        deadline, counted from the first look at its pipe: a caller that was away for long has not read all yet.
        """
        self._listener, self._grace = listener, grace
        self._selector = selectors.DefaultSelector()
        self._spawn: Callable[[], P] = partial(spawn, kind, module, self._selector, hello, variables or {}, python)
        self._look_at = 0.0
        self.all: list[P] = [self._spawn() for _ in range(count)]

    def send(self, process: P, message: dict[str, Any]) -> None:
        """Send a line without waiting."""
        process.to_send += (json.dumps(message) + "\n").encode()
        process.flush()

    def replace(self, process: P) -> None:
        """Kill a process, and put a fresh one in its place unless it is retired."""
        process.kill()
        place = self.all.index(process)
        self.all[place : place + 1] = [] if process.retired else [self._spawn()]

    def turn(self, wait: float) -> None:
        """Handle lines of the processes, waiting up to `wait` seconds for the first, and look at their deadlines."""
        tick()  # a sign of life: work that hangs is ended by the clocks of its process and of this one
        look = wait > 0 or time.monotonic() >= self._look_at
        if wait > 0:
            due = min(self._due(process) for process in self.all)
            wait = min(wait, 1.0, max(0.0, due - time.monotonic()))
        for key, events in self._selector.select(max(0.0, wait)):
            process: P = key.data
            if events & selectors.EVENT_WRITE and process in self.all:
                process.flush()
            if events & selectors.EVENT_READ:
                self._read(process)
        if not look:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        for process in list(self.all):
            if process in self.all and time.monotonic() >= self._due(process):
                if process.silent is None:
                    process.silent = time.monotonic()
                else:
                    self._listener.on_timeout(process)

    def _due(self, process: P) -> float:
        """Return the time at which the silence of a process must be looked at."""
        if process.silent is not None:
            return process.silent + self._grace
        return self._listener.deadline(process) if process.ready else process.spawned + START_SECONDS

    def _read(self, process: P) -> None:
        if process not in self.all:  # replaced earlier in this turn
            return
        lines, ended = process.read_lines()
        process.silent = None
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                process.ready = True
            elif "loading" in message:
                process.ready, process.spawned = not message["loading"], time.monotonic()
            elif process in self.all and "alive" not in message:
                self._listener.on_message(process, message)
        if ended and process in self.all:
            self._listener.on_exit(process, process.end())

    def shutdown(self) -> None:
        """End the processes: those that are ready get a moment to clear up. May be called twice."""
        for process in self.all:
            process.hang_up()
        until = time.monotonic() + LEAVES_WITHIN
        for process in self.all:
            if process.ready:
                process.await_end(max(0.0, until - time.monotonic()))
            process.kill()
        self.all = []
        self._selector.close()
