"""A thread of every rank that tells the others its position, notices when it stands still, and hears requests to leave.

Once a second it writes one key to the rendezvous store and looks for another, over a connection of its own, whatever
the main thread does. So a rank whose collective timed out can say which rank did not come and where that one is.
"""

import json
import os
import signal
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from spmdrl.health import flight_record
from spmdrl.health.overview import STALE, Overview
from spmdrl.health.preempt import Request, preemption
from spmdrl.health.status import Clock, place, rank_status

EVERY = 1.0
"""Seconds between two beats."""
WARM = 30
"""Beats after the first step began at which the flight record is prepared."""
RETRY = 5.0
"""Seconds after an answer of the store that did not come until it is asked again; twice as many after each more."""
LONGEST_PAUSE = 60.0
REMEMBERED = 4096
"""Own beats that are kept, by which those of others are timed."""
PATIENCE = 3.0
"""Seconds beyond a collective's time-out until a rank that stands still is ended: others may know the cause."""


@dataclass(frozen=True)
class Identity:
    """A process, told apart from a later one with the same number."""

    machine: str
    pid: int
    started: str
    parent: int


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def identity() -> Identity:
    """Identity of this process. Its machine is one boot and one name space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = socket.gethostname()
    with suppress(OSError):
        machine = boot.read_text().strip() + os.readlink("/proc/self/ns/pid")
    stat = _stat(os.getpid())
    return Identity(machine, os.getpid(), stat[19] if stat else "", os.getppid())


def state_of(who: Identity) -> str:
    """`R`, `S`, `T` (stopped) and so on as in /proc; empty for a process that has ended, or of another machine."""
    stat = _stat(who.pid)
    return stat[0] if stat and stat[19] == who.started and stat[0] not in "ZX" else ""


class Heart(threading.Thread):
    """Thread of the heartbeat. `start()` it once the process group stands; it ends with the process."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, stuck: Callable[[float], None]):
        """stuck: called with the seconds for which the main thread stood still, once those are above the time-out.

        Args:
            store: shared by all ranks.
            rank: this one.
            size: how many there are.
            timeout: `--run.timeout`.
            stuck: see above; does not return.
        """
        super().__init__(daemon=True, name="heartbeat")
        # Connections of its own: the main thread's may wait in one. `plain` has the keys of `store`.
        self.plain, own = (store.clone() for _ in range(2))  # type: ignore[attr-defined]
        self.store, self.asking = (dist.PrefixStore("beat", mine) for mine in (own, self.plain))
        for mine in (self.store, self.asking):
            with suppress(RuntimeError):
                mine.set_timeout(timedelta(seconds=5))
        self.rank, self.size, self.timeout, self.stuck = rank, size, timeout, stuck
        self.me = identity()
        self.failures = 0
        """Times in a row that the store did not answer."""
        self.again_at = 0.0
        self.seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        """The count of all beats after each own one, and time.monotonic() of it: a clock that all machines share."""
        self.siblings: dict[int, Identity] = {}
        self.overview = Overview(self.asking, self.beats, self.age)
        self.ended = threading.Event()
        self.store.set(f"who/{rank}", json.dumps(asdict(self.me)))

    def run(self) -> None:
        """Beats until the process ends or `ended` is set."""
        clock = Clock(3 * EVERY)
        since, before, beats = time.monotonic(), "", 0
        while not self.ended.is_set():
            where = place()
            idle = clock.look()
            if where != before:
                since, before = time.monotonic(), where
            if time.monotonic() >= self.again_at:
                self._beat(where, since)
            beats += rank_status.step > 0
            if beats == WARM:
                flight_record.warm()
            if rank_status.step and idle > self.timeout + PATIENCE:
                self.stuck(idle)
            self.ended.wait(EVERY)

    @property
    def deaf(self) -> bool:
        """Returns True if the store did not answer when it was last asked."""
        return self.failures > 0

    def _beat(self, where: str, since: float) -> None:
        """Writes this rank's key and reads another's. A store that did not answer is asked later; the watch goes on."""
        try:
            self._tell(where, since)
            self._hear()
            self.failures = 0
        except Exception:
            self.failures += 1
            self.again_at = time.monotonic() + min(RETRY * 2 ** (self.failures - 1), LONGEST_PAUSE)

    def _tell(self, where: str, since: float) -> None:
        now = time.monotonic()
        count = self.store.add("beats", 1)
        self.seen.append((count, now))
        beat = {"time": time.time(), "phase": rank_status.name, "step": rank_status.step, "place": where}
        self.store.set(f"at/{self.rank}", json.dumps(beat | {"count": count, "stood": now - since}))

    def _hear(self) -> None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if len(self.siblings) < local - 1:
            first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
            for rank in range(first, min(first + local, self.size)):
                if rank != self.rank and rank not in self.siblings and self.store.check([f"who/{rank}"]):
                    who = Identity(**json.loads(self.store.get(f"who/{rank}")))
                    if who.machine == self.me.machine and who.parent == self.me.parent:
                        self.siblings[rank] = who
        if not preemption.wanted and self.store.check(["leave"]):
            preemption.heed(Request(**json.loads(self.store.get("leave"))))

    def ask_all(self, request: Request) -> None:
        """Tells every rank of a request, within a beat."""
        with suppress(Exception):
            self.asking.set("leave", json.dumps(asdict(request)))

    # ── the other ranks ──────────────────────────────────────────────────────

    def lost(self) -> str:
        """Reason to end at once on SIGTERM: torchrun is gone, or a rank of this machine; empty where all live."""
        if os.getppid() != self.me.parent:
            return "torchrun is gone"
        gone = [rank for rank, who in sorted(self.siblings.items()) if not state_of(who)]
        return f"rank {', '.join(map(str, gone))} is lost" if gone else ""

    def beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict]:
        """Returns the last beats of some ranks, of all by default; none where one of those has not written any."""
        ranks = list(range(self.size) if ranks is None else ranks)
        with suppress(Exception):
            found = self.asking.multi_get([f"at/{rank}" for rank in ranks]) if ranks else []
            return dict(zip(ranks, map(json.loads, found), strict=True))
        return {}

    def age(self, beat: dict) -> float:
        """Seconds since a beat of any rank, by this rank's clock: clocks of two machines may differ by more."""
        at = bisect_left(seen := list(self.seen), (beat["count"], 0.0))
        # A beat that came after the last own one is of this moment.
        return time.monotonic() - seen[at][1] if at < len(seen) else 0.0

    def missing(self) -> str:
        """Ranks that a collective of this rank waits for, in words; empty where none stands out."""
        stopped = {rank for rank, who in self.siblings.items() if state_of(who) in ("T", "t")}
        return self.overview.missing(self.rank, place(), self.beats(sorted(stopped)))

    def end_stuck_siblings(self) -> None:
        """Sends SIGKILL to ranks of this machine that will not react to torchrun's SIGTERM: stopped, or without a beat.

        torchrun itself sends it only after 30 s.
        """
        beats = self.beats(sorted(self.siblings)) if not self.deaf else {}
        for rank, who in self.siblings.items():
            state = state_of(who)
            silent = rank in beats and self.age(beats[rank]) > STALE
            if state and (state in ("T", "t") or silent):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(who.pid, signal.SIGKILL)


hearts: list[Heart] = []
"""The heartbeat of this process, once it runs."""
