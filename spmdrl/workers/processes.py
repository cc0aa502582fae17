"""The processes of a pool: started, spoken to in JSON lines, watched by a clock, and replaced.

Each first says `{"ready": true}`. `{"loading": true}` says that it loads something, which is no answer's time, and
`{"loading": false}` that it has. `{"alive": true}` is a sign of life. All other lines are for the pool.
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
"""Seconds after which a caller that does not wait looks at the deadlines of all requests again: it may come between two
steps of an engine, thousands of times, with hundreds of requests under way."""


@dataclass(eq=False)
class Process(Child):
    """A process of a pool."""

    retired: bool = False
    """It ends with the requests that are under way in it, and none takes its place."""
    silent: float | None = None
    """When it was listened to in vain after its deadline; None once it said anything (time.monotonic())."""


P = TypeVar("P", bound=Process)


class Listener(Protocol):
    """The pool, as its processes know it."""

    def hear(self, process: Any, message: dict[str, Any], /) -> None:
        """Take a line of a process."""
        ...

    def deadline(self, process: Any, /) -> float:
        """When a process should have answered (time.monotonic())."""
        ...

    def stuck(self, process: Any, /) -> None:
        """Take that a process says nothing after its deadline, or does not start. It must be replaced."""
        ...

    def died(self, process: Any, how: str, /) -> None:
        """Take that a process ended by itself. It must be replaced."""
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
        deadline. They count from the first look at its pipe, which after a long absence of the caller may hold less
        than the process has to say.
        """
        self._listener, self._grace = listener, grace
        self._selector = selectors.DefaultSelector()
        self._spawn: Callable[[], P] = partial(spawn, kind, module, self._selector, hello, variables or {}, python)
        self._look_at = 0.0
        self.all: list[P] = [self._spawn() for _ in range(count)]

    def send(self, process: P, message: dict[str, Any]) -> None:
        """Send a line, without waiting."""
        process.to_send += (json.dumps(message) + "\n").encode()
        process.flush()

    def replace(self, process: P) -> None:
        """Kill a process, and put a fresh one in its place unless it is retired."""
        process.kill()
        place = self.all.index(process)
        self.all[place : place + 1] = [] if process.retired else [self._spawn()]

    def turn(self, wait: float) -> None:
        """Hear what the processes say, waiting up to `wait` seconds for the first, and look at their deadlines."""
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
                    self._listener.stuck(process)

    def _due(self, process: P) -> float:
        """When the silence of a process must be looked at."""
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
                self._listener.hear(process, message)
        if ended and process in self.all:
            self._listener.died(process, process.end())

    def shutdown(self) -> None:
        """End the processes: those that are ready get a moment to clear up. May be called twice."""
        for process in self.all:
            process.hang_up()
        until = time.monotonic() + LEAVES_WITHIN
        for process in self.all:
            if process.ready:
                process.leave(max(0.0, until - time.monotonic()))
            process.kill()
        self.all = []
        self._selector.close()
