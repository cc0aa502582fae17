"""Preemption: on a signal, the run finishes its step, or abandons the step if it is still sampling. The run then saves
and exits.

Once the first step has started, SIGUSR1 or SIGINT (Ctrl-C) to any rank is a request to all ranks. A SIGTERM is also a
request, unless it was sent because a rank was lost. A request received by one rank takes effect only after `Agreement`
or the sampler has all-reduced it (law 1 in CONTRIBUTING.md).
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

AGENT_WAITS = 25.0
"""Longest grace period in seconds after a SIGTERM or SIGINT under torchrun, which sends SIGKILL after 30 s."""
FROM_AGENT = (signal.SIGTERM, signal.SIGINT)
"""Signals that torchrun forwards to its ranks by default."""
SAMPLING = 0.5
"""Fraction of the grace period during which a step may keep sampling. The rest is for saving."""
ECHO = 3.0
"""Seconds within which a second signal of the same kind counts as forwarded by torchrun: a scheduler may signal all
processes of a job."""


class PreemptedError(Exception):
    """Raised on every rank once all ranks have agreed to leave."""

    def __init__(self, step: int, why: str, abandoned: bool = False):
        """Create the error.

        step: number of finished steps. abandoned: True if another step had started.
        """
        super().__init__(why)
        self.step, self.abandoned = step, abandoned


class AbandonedError(Exception):
    """Raised on every sampling rank once all of them have agreed to stop sampling and grading."""


@dataclass(frozen=True)
class Request:
    """A request to end the run."""

    signal: str
    rank: int
    """Rank that received the signal."""
    at: float
    """Unix time when `rank` received the signal, by the clock of its machine. It is only reported and never compared,
    because machines' clocks differ."""
    grace: float
    """Seconds until the job must have exited. Every rank counts them from the moment it receives the request."""

    def __str__(self) -> str:
        return f"{self.signal} at rank {self.rank}"


class Preemption:
    """The request to leave that this rank has received, if any. There is one object per process."""

    def __init__(self) -> None:
        """Start without a request."""
        self.request: Request | None = None
        self.received = 0.0
        """time.monotonic() when this rank received the request."""
        self.signals: list[tuple[int, float]] = []
        """Signals received by this process, with the time.monotonic() of each."""
        self.grace = 60.0
        self.on_grace_over: Callable[[], None] = lambda: None
        """Function that a thread calls when the grace period is over."""

    def is_repeat(self, number: int) -> bool:
        """Record a signal to this process. Returns True for a second signal, which ends the job at once.

        Under torchrun two SIGTERM or two SIGINT within `ECHO` seconds count as one: a signal to all processes of a job
        (SLURM's time limit, systemd, Ctrl-C in a terminal) reaches a rank directly and through torchrun. The same holds
        for SIGUSR1 if torchrun forwards it (`torchrun --signals-to-handle`).
        """
        self.signals.append((number, time.monotonic()))
        handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
        forwarded = number in FROM_AGENT or signal.Signals(number).name in handled
        echo = (
            len(self.signals) == 2
            and all(one == number for one, _ in self.signals)
            and forwarded
            and "TORCHELASTIC_RUN_ID" in os.environ
            and self.signals[1][1] - self.signals[0][1] < ECHO
        )
        return len(self.signals) > 1 and not echo

    def request_for(self, number: int) -> Request:
        """Return the request to leave that corresponds to a signal to this process."""
        under_agent = number in FROM_AGENT and "TORCHELASTIC_RUN_ID" in os.environ
        grace = min(self.grace, AGENT_WAITS) if under_agent else self.grace
        return Request(signal.Signals(number).name, int(os.environ.get("RANK", "0")), time.time(), grace)

    def accept(self, request: Request) -> bool:
        """Accept the first request and start its grace period. Returns False for any later request."""
        if self.request is not None:
            return False
        self.request, self.received = request, time.monotonic()
        timer = threading.Timer(request.grace, lambda: self.on_grace_over())
        timer.daemon = True
        timer.start()
        return True

    @property
    def requested(self) -> bool:
        """True once this rank has received a request."""
        return self.request is not None

    @property
    def sampling_over(self) -> bool:
        """True once the part of the grace period in which a step may keep sampling (SAMPLING) is over."""
        return self.request is not None and time.monotonic() > self.received + SAMPLING * self.request.grace


preemption = Preemption()


def any_rank(mine: bool, group: dist.ProcessGroup) -> bool:
    """Return True on every rank if `mine` is True on any rank. Collective."""
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def on_signals(handler: Callable[[int], None]) -> Callable[[], None]:
    """Call `handler(number)` in a thread for SIGTERM, SIGUSR1 and SIGINT. Returns a function that undoes this.

    An ignored SIGINT stays ignored, as in a background job of a script. The thread is needed because Python runs no
    handler while the main thread waits in a collective. Call this function in the main thread only. Forked processes
    get their previous handlers back.
    """
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    read, write = os.pipe()
    os.set_blocking(write, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    before: list[tuple] = [(handlers, signal.set_wakeup_fd(write, warn_on_full_buffer=False))]

    def give_back() -> None:
        if before:
            handlers, fd = before.pop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd)
            os.close(write)

    def wait() -> None:
        while data := os.read(read, 64):
            for number in data:
                if number in numbers:
                    handler(number)

    os.register_at_fork(after_in_child=give_back)
    threading.Thread(target=wait, daemon=True, name="signals").start()
    return give_back
