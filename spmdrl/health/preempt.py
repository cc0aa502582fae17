"""Preemption: a signal asks the run to end well. The step is finished, or abandoned while it samples, and saved.

SIGUSR1 or SIGINT (Ctrl-C) to any one rank is a request to all, and so is a SIGTERM that was not sent because of a lost
rank. By law 1 a request that one rank has heard decides nothing by itself; `Agreement` and the sampling ask all ranks.
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
"""Seconds after a SIGTERM or SIGINT under torchrun, which sends SIGKILL after 30."""
FROM_AGENT = (signal.SIGTERM, signal.SIGINT)
"""Signals that torchrun passes on unless it is told otherwise."""
SAMPLING = 0.5
"""Share of the grace that a step may go on to sample; the rest is for the save."""
ECHO = 3.0
"""Seconds in which a second signal of one kind counts as torchrun's own: a job's end may be signalled to all its
processes."""


class PreemptedError(Exception):
    """Error on every rank once all ranks agreed to leave."""

    def __init__(self, step: int, why: str, abandoned: bool = False):
        """step: how many are done and in the weights. abandoned: the one after it had begun."""
        super().__init__(why)
        self.step, self.abandoned = step, abandoned


class AbandonedError(Exception):
    """Error on every rank that samples, once all of them agreed to stop sampling and grading."""


@dataclass(frozen=True)
class Request:
    """A request to end the run."""

    signal: str
    rank: int
    """Rank that received the signal."""
    at: float
    """time.time() of the signal by that rank's clock: for messages, not for comparison with another machine's clock."""
    grace: float
    """Seconds until the job must be gone, which every rank counts from the moment it heard of the request."""

    def __str__(self) -> str:
        return f"{self.signal} at rank {self.rank}"


class Preemption:
    """Requests to leave that this rank has heard; one per process."""

    def __init__(self) -> None:
        """Starts without a request."""
        self.request: Request | None = None
        self.heard = 0.0
        """time.monotonic() when this rank heard of it."""
        self.own: list[tuple[int, float]] = []
        """Signals that came to this process itself, and time.monotonic() when."""
        self.grace = 60.0
        self.late: Callable[[], None] = lambda: None
        """Function that a thread calls when time is up."""

    def again(self, number: int) -> bool:
        """Notes a signal to this process; returns True if it is one too many, which ends the job at once.

        Under torchrun two SIGTERM or two SIGINT within `ECHO` are one: a signal to all processes of a job (the time
        limit of SLURM, systemd, Ctrl-C in a terminal) reaches a rank directly and by way of torchrun. So are two
        SIGUSR1 where torchrun passes those on (`torchrun --signals-to-handle`).
        """
        self.own.append((number, time.monotonic()))
        echo = (
            len(self.own) == 2
            and all(one == number for one, _ in self.own)
            and passed_on(number)
            and self.own[1][1] - self.own[0][1] < ECHO
        )
        return len(self.own) > 1 and not echo

    def asked(self, number: int) -> Request:
        """Makes a request from a signal to this process."""
        under_agent = number in FROM_AGENT and "TORCHELASTIC_RUN_ID" in os.environ
        grace = min(self.grace, AGENT_WAITS) if under_agent else self.grace
        return Request(signal.Signals(number).name, int(os.environ.get("RANK", "0")), time.time(), grace)

    def heed(self, request: Request) -> bool:
        """Takes up the first request; returns False for a further one."""
        if self.request is not None:
            return False
        self.request, self.heard = request, time.monotonic()
        timer = threading.Timer(request.grace, lambda: self.late())
        timer.daemon = True
        timer.start()
        return True

    @property
    def wanted(self) -> bool:
        """True where this rank has heard of a request."""
        return self.request is not None

    @property
    def sampling_over(self) -> bool:
        """True where this rank heard of a request so long ago that sampling should stop."""
        return self.request is not None and time.monotonic() > self.heard + SAMPLING * self.request.grace


preemption = Preemption()


def passed_on(number: int) -> bool:
    """True under a torchrun that sends its ranks a signal that it gets, as it does with those of `FROM_AGENT`."""
    name = signal.Signals(number).name
    told = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    return "TORCHELASTIC_RUN_ID" in os.environ and (number in FROM_AGENT or name in told)


def agreed(mine: bool, group: dist.ProcessGroup) -> bool:
    """Returns True on every rank if `mine` is true on one. Collective."""
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def listen(told: Callable[[int], None]) -> Callable[[], None]:
    """Calls `told(number)` in a thread for SIGTERM, SIGUSR1 and SIGINT. Returns a function that ends that.

    SIGINT stays ignored where it was, as in a background job of a script.
    It takes a thread, as the main one may wait in a collective, where Python runs no handler. Call it in the main
    thread only; forked processes get back the handlers that were there before.
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
                    told(number)

    os.register_at_fork(after_in_child=give_back)
    threading.Thread(target=wait, daemon=True, name="signals").start()
    return give_back
