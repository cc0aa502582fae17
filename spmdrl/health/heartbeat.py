"""The heartbeat: a thread that publishes its rank's position, detects a stuck main thread, and reads requests to leave.

Once a second, even if the main thread hangs, the heartbeat thread writes this rank's position to the rendezvous store
and checks for requests to leave. The thread has its own connection to the store. A rank whose collective timed out can
therefore name the missing rank and its source line.
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
from spmdrl.health.status import IdleClock, place, rank_status

EVERY = 1.0
"""Seconds between beats."""
WARM = 30
"""Number of beats between the start of the first step and the call of `flight_record.warm`."""
RETRY = 5.0
"""Seconds before a retry when the store did not answer. The pause doubles after each subsequent failure."""
LONGEST_PAUSE = 60.0
REMEMBERED = 4096
"""Maximum number of this rank's own beats that are kept to compute the age of other ranks' beats."""
PATIENCE = 3.0
"""Seconds beyond `--run.timeout` before a rank without progress is terminated, so that a collective's time-out is
reported first."""


@dataclass(frozen=True)
class Identity:
    """Identifies a process. A later process with the same PID has a different start time."""

    machine: str
    pid: int
    started: str
    parent: int


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the process state on, or [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def identity() -> Identity:
    """Return the identity of this process. `machine` identifies one boot and one PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = socket.gethostname()
    with suppress(OSError):
        machine = boot.read_text().strip() + os.readlink("/proc/self/ns/pid")
    stat = _stat(os.getpid())
    return Identity(machine, os.getpid(), stat[19] if stat else "", os.getppid())


def state_of(process: Identity) -> str:
    """Return a process's state as in /proc, such as `R`, `S` or `T` (stopped), or "" if it has exited."""
    stat = _stat(process.pid)
    return stat[0] if stat and stat[19] == process.started and stat[0] not in "ZX" else ""


class Heartbeat(threading.Thread):
    """The thread that sends the heartbeat. Call `start()` once the process group exists. The thread ends with the
    process.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, stuck: Callable[[float], None]):
        """Open connections to the store, which all ranks share, and publish the identity of this process.

        timeout: `--run.timeout`. stuck: function that does not return. Once the main thread has made no progress for
        longer than the time-out, `stuck` is called with the seconds since its last progress.
        """
        super().__init__(daemon=True, name="heartbeat")
        # The two clones have their own connections, because the main thread may block on the connection of `store`.
        # `plain` uses keys without the prefix `beat`.
        self.plain, own = (store.clone() for _ in range(2))  # type: ignore[attr-defined]
        self.store, self.side_store = (dist.PrefixStore("beat", mine) for mine in (own, self.plain))
        for mine in (self.store, self.side_store):
            with suppress(RuntimeError):
                mine.set_timeout(timedelta(seconds=5))
        self.rank, self.size, self.timeout, self.stuck = rank, size, timeout, stuck
        self.me = identity()
        self.failures = 0
        """How many times in a row the store did not answer."""
        self.again_at = 0.0
        self.seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        """(total beats of all ranks as counted by the store, time.monotonic()) at each beat of this rank."""
        self.siblings: dict[int, Identity] = {}
        self.overview = Overview(self.side_store, self.beats, self.age)
        self.ended = threading.Event()
        self.store.set(f"who/{rank}", json.dumps(asdict(self.me)))

    def run(self) -> None:
        """Send beats until the process ends or `ended` is set."""
        clock = IdleClock(3 * EVERY)
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
    def store_silent(self) -> bool:
        """True if the store did not answer the last request."""
        return self.failures > 0

    def _beat(self, where: str, since: float) -> None:
        """Publish this rank's position, and read which ranks share this machine and any request to leave.

        If the store does not answer, try again later.
        """
        try:
            self._publish(where, since)
            self._read_others()
            self.failures = 0
        except Exception:
            self.failures += 1
            self.again_at = time.monotonic() + min(RETRY * 2 ** (self.failures - 1), LONGEST_PAUSE)

    def _publish(self, where: str, since: float) -> None:
        now = time.monotonic()
        count = self.store.add("beats", 1)
        self.seen.append((count, now))
        beat = {"time": time.time(), "phase": rank_status.name, "step": rank_status.step, "place": where}
        self.store.set(f"at/{self.rank}", json.dumps(beat | {"count": count, "stood": now - since}))

    def _read_others(self) -> None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if len(self.siblings) < local - 1:
            first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
            for rank in range(first, min(first + local, self.size)):
                if rank != self.rank and rank not in self.siblings and self.store.check([f"who/{rank}"]):
                    other = Identity(**json.loads(self.store.get(f"who/{rank}")))
                    if other.machine == self.me.machine and other.parent == self.me.parent:
                        self.siblings[rank] = other
        if not preemption.requested and self.store.check(["leave"]):
            preemption.accept(Request(**json.loads(self.store.get("leave"))))

    def publish_request(self, request: Request) -> None:
        """Publish a request to leave, which every rank reads at its next beat."""
        with suppress(Exception):
            self.side_store.set("leave", json.dumps(asdict(request)))

    # ── the other ranks ──────────────────────────────────────────────────────

    def lost(self) -> str:
        """Return text that names torchrun or the ranks on this machine that are gone, or "" if none are."""
        if os.getppid() != self.me.parent:
            return "torchrun is gone"
        gone = [rank for rank, process in sorted(self.siblings.items()) if not state_of(process)]
        if len(gone) == 1:
            return f"rank {gone[0]} is lost"
        return f"ranks {', '.join(map(str, gone))} are lost" if gone else ""

    def beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict]:
        """Return the last beats of `ranks` (default: all), or {} if a beat is missing or the store is silent."""
        ranks = list(range(self.size) if ranks is None else ranks)
        with suppress(Exception):
            found = self.side_store.multi_get([f"at/{rank}" for rank in ranks]) if ranks else []
            return dict(zip(ranks, map(json.loads, found), strict=True))
        return {}

    def age(self, beat: dict) -> float:
        """Return the seconds since a rank's beat, measured by this rank's clock because machines' clocks may differ."""
        at = bisect_left(seen := list(self.seen), (beat["count"], 0.0))
        # A beat that is newer than this rank's last beat counts as 0 s old.
        return time.monotonic() - seen[at][1] if at < len(seen) else 0.0

    def missing(self) -> str:
        """Return, as text, the ranks that this rank's collective is waiting for. Empty if unknown."""
        stopped = {rank for rank, process in self.siblings.items() if state_of(process) in ("T", "t")}
        return self.overview.missing(self.rank, place(), self.beats(sorted(stopped)))

    def end_stuck_siblings(self) -> None:
        """Send SIGKILL to ranks on this machine that are stopped or silent, because they ignore torchrun's SIGTERM.

        torchrun itself would send SIGKILL only after 30 s.
        """
        beats = self.beats(sorted(self.siblings)) if not self.store_silent else {}
        for rank, process in self.siblings.items():
            state = state_of(process)
            silent = rank in beats and self.age(beats[rank]) > STALE
            if state and (state in ("T", "t") or silent):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)


heartbeats: list[Heartbeat] = []
"""The heartbeat of this process. The list is empty until the heartbeat is started."""
