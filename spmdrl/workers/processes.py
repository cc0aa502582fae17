"""Starts the processes of a pool, exchanges JSON lines with them, enforces deadlines, and replaces processes.

A process sends `{"ready": true}` once it has started. It sends `{"loading": true}` before it loads a file and
`{"loading": false}` afterwards; response deadlines are suspended in between. `{"alive": true}` is a heartbeat. All
other lines are for the pool.
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
"""Time limit in seconds for starting a process, and for importing a user's file, which can be slow."""
LOOK_EVERY = 0.05
"""Minimum seconds between two deadline checks by `turn(0)`, which callers may call after every engine step."""


@dataclass(eq=False)
class Process(Child):
    """A child process that belongs to a pool."""

    retired: bool = False
    """True if the process will exit after its current requests without being replaced."""
    silent: float | None = None
    """Time (time.monotonic()) of the check that found a missed deadline, or None if the process has missed no deadline
    since its last line."""


P = TypeVar("P", bound=Process)


class Listener(Protocol):
    """Callbacks that `Processes` calls on its pool."""

    def on_message(self, process: Any, message: dict[str, Any], /) -> None:
        """Handle a message from a process."""
        ...

    def deadline(self, process: Any, /) -> float:
        """Return the response deadline of a process (time.monotonic())."""
        ...

    def on_timeout(self, process: Any, /) -> None:
        """Handle a process that missed its deadline or did not start in time: replace it, or raise an exception."""
        ...

    def on_exit(self, process: Any, how: str, /) -> None:
        """Handle a process that exited: replace it, or raise an exception. how: the result of `Child.end`."""
        ...


class Processes(Generic[P]):
    """A set of processes of one kind. The listener decides whether to replace a process that exited or hangs."""

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
        """Start the processes without waiting for them.

        kind, module, hello, variables, python: see `spawn`. grace: seconds that a process may stay silent after its
        deadline. This time counts from the first check after the deadline, because responses may be unread if the
        caller has not called `turn` for a long time.
        """
        self._listener, self._grace = listener, grace
        self._selector = selectors.DefaultSelector()
        self._spawn: Callable[[], P] = partial(spawn, kind, module, self._selector, hello, variables or {}, python)
        self._look_at = 0.0
        self.all: list[P] = [self._spawn() for _ in range(count)]

    def send(self, process: P, message: dict[str, Any]) -> None:
        """Send a message as one line of JSON, without waiting."""
        process.to_send += (json.dumps(message) + "\n").encode()
        process.flush()

    def replace(self, process: P) -> None:
        """Kill a process, and start a replacement unless it is retired."""
        process.kill()
        place = self.all.index(process)
        self.all[place : place + 1] = [] if process.retired else [self._spawn()]

    def turn(self, wait: float) -> None:
        """Handle lines from the processes, wait up to `wait` seconds for the first, and check the deadlines."""
        tick()  # tells the watchdog that this rank is alive; the deadlines below catch work that hangs
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
        """Return the time (time.monotonic()) of the next deadline check for a process."""
        if process.silent is not None:
            return process.silent + self._grace
        return self._listener.deadline(process) if process.ready else process.spawned + START_SECONDS

    def _read(self, process: P) -> None:
        if process not in self.all:  # the process was replaced earlier in this call of `turn`
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
        """Shut down the processes. Ready ones get up to `LEAVES_WITHIN` seconds to exit. Safe to call twice."""
        for process in self.all:
            process.hang_up()
        until = time.monotonic() + LEAVES_WITHIN
        for process in self.all:
            if process.ready:
                process.await_end(max(0.0, until - time.monotonic()))
            process.kill()
        self.all = []
        self._selector.close()
