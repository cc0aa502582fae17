"""The processes of a pool: started, spoken to in JSON lines, watched by a clock, and replaced."""

import json
import selectors
import time
from dataclasses import dataclass
from typing import Any, Protocol

from spmdrl.health.child import LEAVES_WITHIN, Child, spawn
from spmdrl.health.status import tick

START_SECONDS = 120.0
"""Longest a process may take to start, or to import an environment's file (a cold file system is slow)."""


SILENT_FOR = 1.0
"""Seconds that a process may be silent after its deadline. They count from the first look at its pipe, which after a
long absence of the caller may hold less than the process has to say."""


class PoolError(RuntimeError):
    """Processes for environments cannot be started."""


LOOK_EVERY = 0.05
"""Seconds after which a caller that does not wait looks at the deadlines of all requests again: it may come between two
steps of an engine, thousands of times, with hundreds of requests under way."""


@dataclass(eq=False)
class Process(Child):
    """A process of environments."""

    holds: int = 0
    """Environments in it."""
    silent: float | None = None
    """When it was listened to in vain after its deadline; None once it said anything (time.monotonic())."""


class Listener(Protocol):
    """The pool, as its processes know it."""

    def hear(self, process: Process, message: dict[str, Any]) -> None:
        """Take a line of a process."""
        ...

    def deadline(self, process: Process) -> float:
        """When a process should have answered (time.monotonic())."""
        ...

    def stuck(self, process: Process) -> None:
        """Take that a process says nothing for `SILENT_FOR` seconds after its deadline. It must be replaced."""
        ...

    def died(self, process: Process, how: str) -> None:
        """Take that a process ended by itself. It must be replaced."""
        ...


class Processes:
    """A fixed number of processes."""

    def __init__(self, count: int, hello: dict[str, Any], listener: Listener):
        """hello: the first line for each. The processes are not waited for."""
        self._hello, self._listener = hello, listener
        self._selector = selectors.DefaultSelector()
        self._look_at = 0.0
        self._all = [self._spawn() for _ in range(count)]

    def _spawn(self) -> Process:
        # Sets of texts have one order in all processes, and a replay meets the order that it met before.
        fixed = {"PYTHONHASHSEED": "0"}
        return spawn(Process, "spmdrl.env.worker", self._selector, self._hello, fixed, self._hello["python"])

    def emptiest(self) -> Process:
        """Return the process with the fewest environments."""
        return min(self._all, key=lambda process: process.holds)

    def send(self, process: Process, message: dict[str, Any]) -> None:
        """Send a line, without waiting."""
        process.to_send += (json.dumps(message) + "\n").encode()
        process.flush()

    def replace(self, process: Process) -> None:
        """Kill a process and put a fresh one in its place."""
        process.kill()
        self._all[self._all.index(process)] = self._spawn()

    def turn(self, wait: float) -> None:
        """Hear what the processes say, waiting up to `wait` seconds for the first; replace those that answer nothing.

        Raises:
            PoolError: a process that has nothing to do does not start.
        """
        tick()  # a sign of life: an environment that hangs is ended by the clocks of its process and of this one
        if wait > 0:
            due = min(self._due(process) for process in self._all)
            wait = min(wait, 1.0, max(0.0, due - time.monotonic()))
        for key, events in self._selector.select(max(0.0, wait)):
            process: Process = key.data
            if events & selectors.EVENT_WRITE and process in self._all:
                process.flush()
            if events & selectors.EVENT_READ:
                self._read(process)
        if wait <= 0 and time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        for process in list(self._all):
            if time.monotonic() >= self._due(process):
                if process.silent is None:
                    process.silent = time.monotonic()
                else:
                    self._listener.stuck(process)

    def _due(self, process: Process) -> float:
        """When the silence of a process must be looked at."""
        if process.silent is not None:
            return process.silent + SILENT_FOR
        return self._listener.deadline(process) if process.ready else process.spawned + START_SECONDS

    def _read(self, process: Process) -> None:
        if process not in self._all:  # replaced earlier in this turn
            return
        lines, ended = process.read_lines()
        process.silent = None
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                process.ready = True
            elif "loading" in message:
                process.ready, process.spawned = not message["loading"], time.monotonic()
            elif process in self._all:
                self._listener.hear(process, message)
        if ended and process in self._all:
            self._listener.died(process, process.end())

    def shutdown(self) -> None:
        """End the processes: environments get a moment to clear up. May be called twice."""
        for process in self._all:
            process.hang_up()
        until = time.monotonic() + LEAVES_WITHIN
        for process in self._all:
            if process.ready:
                process.leave(max(0.0, until - time.monotonic()))
            process.kill()
        self._all = []
        self._selector.close()
