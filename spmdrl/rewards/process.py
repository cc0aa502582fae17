"""One worker of the pool as its parent sees it: a child process and the requests that it has."""

import selectors
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spmdrl.health import child


@dataclass(eq=False)
class Worker(child.Child):
    """A worker process with its pipes and requests."""

    queue: deque[int] = field(default_factory=deque)
    """Requests sent and not yet answered, in order: the first may be under way."""
    started: float | None = None
    """When the first of them started (time.monotonic())."""
    may_take: float = 0.0
    """Seconds that it may take, where its reward has clocks of its own."""


def spawn(selector: selectors.BaseSelector, hello: dict[str, Any]) -> Worker:
    """Start a worker and send it the first line, see `worker.py`; `ready` once it has loaded its function."""
    return child.spawn(Worker, "spmdrl.rewards.worker", selector, hello, {})
