"""Environments in processes that can be killed: whatever their code or the model does, a conversation goes on or fails
alone.

No threads and no pickle on the caller's side: each process is spoken to in JSON lines over pipes that never block. Time
limits are kept by the processes themselves; a process that does not even do that is killed by the pool's clock.
"""

import json
import logging
import selectors
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from spmdrl.env.base import Opening, PoolSettings, Reply, Said
from spmdrl.env.limits import GONE_WITHIN
from spmdrl.env.records import Process, Record, wired
from spmdrl.health.child import LEAVES_WITHIN, spawn
from spmdrl.health.status import tick

START_SECONDS = 120.0
"""Longest a process may take to start, or to import an environment's file (a cold file system is slow)."""
DEATHS = 2
"""Times that a process may die during one request before the environment counts as the cause."""
log = logging.getLogger("spmdrl")


class PoolError(RuntimeError):
    """Processes for environments cannot be started."""


class Pool:
    """Open environments in `workers` processes. Use it from one thread (the processes die with it).

    Each environment works on one request at a time; `poll` gives the answers. An environment that failed answers every
    further request with its failure, and is forgotten at `close` like any other.

    A process with a call that goes on beyond its limit ends one second after the limit; one may also die. Environments
    that were in it are opened again in another process when they are next needed: by `restore` to their last state, or
    by running their turns again from the reset, where the messages must be the same. Requests under way are run again.
    After a death they run again one by one, and one whose process dies again has failed.
    """

    def __init__(self, workers: int, settings: PoolSettings | None = None):
        """Start the processes, without waiting for them."""
        if workers < 1:
            raise ValueError(f"{workers} processes for environments: there must be 1 at least")
        self._hello = asdict(settings or PoolSettings())
        self._next = 0
        self._records: dict[Hashable, Record] = {}
        self._asked: dict[int, Record] = {}  # by number of the request: all that are under way
        self._suspects: deque[Record] = deque()  # requests whose process died, which wait to run one by one
        self._suspect: Record | None = None  # the one that runs
        self._done: list[tuple[Any, Reply]] = []
        self._unsaved: set[str] = set()  # names of environments whose state could not be saved
        self._selector = selectors.DefaultSelector()
        self._workers = [self._spawn() for _ in range(workers)]

    @property
    def pending(self) -> int:
        """Answers that `poll` has not given yet."""
        return len(self._asked) + len(self._done)

    # ── requests ─────────────────────────────────────────────────────────────

    def check(self, name: str, settings: dict[str, Any] | None = None) -> str:
        """Return what an environment's name stands for, in words, after making one. Waits for it.

        Raises:
            ValueError: there is none, or it cannot be made with these settings.
        """
        record = Record(object(), -1, Opening(name, {}, 0, settings or {}))
        hello: list[str] = []
        record.said = hello  # where the answer goes
        self._ask(record, "check")
        while not hello and not record.failure:
            self._turn(0.2)
        if record.failure:
            raise ValueError(f"the environment {name} {record.failure}")
        return hello[0]

    def open(self, key: Hashable, opening: Opening, replayed: Sequence[Said] = (), state: Any = None) -> None:
        """Reset an environment. Then restore it to a state, if there is one, or run the turns `replayed` again.

        key: names it in all further calls, and in failures: (prompt, sample, ...), or any other.
        """
        assert key not in self._records, f"{key} is open"
        record = Record(key, self._next, opening)
        self._records[key] = record
        try:
            json.dumps([opening.row, opening.settings])
            if state is not None:
                record.state = json.dumps(state)
            else:
                record.turns = [wired(said) for said in replayed]
        except (TypeError, ValueError) as e:
            return self._fail(record, f"cannot be opened: its row, settings, turns or state are no JSON: {e}")
        self._ask(record, "open")

    def say(self, key: Hashable, said: Said) -> None:
        """Hand over a turn of the assistant: its calls are made, side by side, and then `step`.

        When the answer comes, `late` is set in those calls of `said` that did not answer in time, so that a replay does
        not make them again.
        """
        record = self._records[key]
        record.said, record.turn = said, wired(said)
        self._ask(record, "say")

    def score(self, key: Hashable) -> None:
        """Ask for the final reward."""
        self._ask(self._records[key], "score")

    def save(self, key: Hashable) -> None:
        """Ask for the state after the last answer, from which `open` goes on.

        It is answered at once. While a turn is under way, it is the state before that turn, which is to be said again.
        The state is None where the environment is to be opened with its turns.
        """
        record = self._records[key]
        whole = record.state is not None and not record.turns and not record.failure
        self._done.append((key, Reply(state=json.loads(record.state) if whole and record.state else None)))

    def close(self, key: Hashable) -> None:
        """Close an environment and forget it, with a request that is under way and answers that were not fetched."""
        record = self._records.pop(key)
        self._done = [(other, reply) for other, reply in self._done if other != key]
        if record in self._suspects:
            self._suspects.remove(record)
        self._asked.pop(record.request, None)
        if record.worker is not None:
            record.worker.holds -= 1
            self._send(record.worker, {"do": "close", "env": record.number})
        self._settle(record)

    def poll(self, wait: float = 0.0) -> list[tuple[Any, Reply]]:
        """Return the answers that came, waiting up to `wait` seconds for the first where some are owed.

        Raises:
            PoolError: a process could not be started.
        """
        until = time.monotonic() + wait
        self._turn(0.0)
        while self._asked and not self._done and (left := until - time.monotonic()) > 0:
            self._turn(left)
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        """End the processes: environments get a moment to clear up. May be called twice."""
        for worker in self._workers:
            worker.hang_up()
        until = time.monotonic() + LEAVES_WITHIN
        for worker in self._workers:
            if worker.ready:
                worker.leave(max(0.0, until - time.monotonic()))
            worker.kill()
        self._workers = []
        self._records, self._asked, self._done = {}, {}, []
        self._selector.close()

    # ── sending ──────────────────────────────────────────────────────────────

    def _spawn(self) -> Process:
        # Sets of texts have one order in all processes, and a replay meets the order that it met before.
        return spawn(Process, "spmdrl.env.worker", self._selector, self._hello, {"PYTHONHASHSEED": "0"})

    def _send(self, worker: Process, message: dict[str, Any]) -> None:
        worker.to_send += (json.dumps(message) + "\n").encode()
        worker.flush()

    def _ask(self, record: Record, do: str) -> None:
        """Begin a request of an environment."""
        assert record.request < 0, f"{record.key} works on another request"
        if record.failure:
            record.turn = None
            self._done.append((record.key, Reply(failure=record.failure)))
            return
        record.do, record.deaths = do, 0
        try:
            json.dumps(record.turn)
        except (TypeError, ValueError) as e:
            return self._fail(record, f"got a turn that is no JSON: {e}")
        self._run(record)

    def _run(self, record: Record) -> None:
        """Send a record's request, to the process with the fewest environments where it is in none."""
        self._asked.pop(record.request, None)
        record.request, record.begun = self._next, []
        self._next += 1
        self._asked[record.request] = record
        message = record.message()
        if record.worker is None:
            record.worker = min(self._workers, key=lambda worker: worker.holds)
            record.worker.holds += 1
        self._send(record.worker, message)

    def _settle(self, record: Record) -> None:
        """A record's request is over; the next suspect may run."""
        self._asked.pop(record.request, None)
        record.request, record.turn, record.said = -1, None, None
        if record is self._suspect:
            self._suspect = None
        if self._suspect is None and self._suspects:
            self._suspect = self._suspects.popleft()
            self._run(self._suspect)

    def _fail(self, record: Record, why: str) -> None:
        if record.do == "check":
            record.failure = why
        else:
            record.failure = record.failed(why)
            self._done.append((record.key, Reply(failure=record.failure)))
        self._settle(record)

    # ── one turn: read, check clocks ─────────────────────────────────────────

    def _turn(self, wait: float) -> None:
        tick()  # a sign of life: an environment that hangs is ended by the clocks of its process and of this pool
        for key, events in self._selector.select(min(wait, self._patience()) if wait > 0 else 0):
            worker: Process = key.data
            if worker not in self._workers:  # ended earlier in this turn
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._read(worker)
        for worker in list(self._workers):
            self._check_clock(worker)

    def _patience(self) -> float:
        """Seconds until the next clock runs out, at most 1."""
        ends = [self._deadline(worker) for worker in self._workers]
        return min(1.0, max(0.0, min(ends) - time.monotonic()))

    def _deadline(self, worker: Process) -> float:
        """When a process that has not been heard of must be killed."""
        if not worker.ready:
            return worker.spawned + START_SECONDS
        ends = (record.end for record in self._asked.values() if record.worker is worker)
        return min(ends, default=float("inf")) + GONE_WITHIN

    def _check_clock(self, worker: Process) -> None:
        if time.monotonic() < self._deadline(worker):
            return
        self._read(worker)  # the answer may lie in the pipe, when the caller comes late
        if worker not in self._workers or time.monotonic() < self._deadline(worker):
            return
        under_way = [record for record in self._asked.values() if record.worker is worker]
        if not worker.ready:
            if not under_way:
                raise PoolError(f"a process for environments did not start within {START_SECONDS:.0f} s")
            self._replace(worker)
            for record in under_way:
                self._fail(record, f"was not loaded within {START_SECONDS:.0f} s")
            return
        # Its loop stands still: an async function blocks, or a call never lets another thread run.
        self._replace(worker)
        for record in under_way:
            self._late(record)

    def _late(self, record: Record) -> None:
        """Run a request again after its process was killed, without the calls whose limits were over."""
        if record.end + GONE_WITHIN < time.monotonic():
            last = record.begun[-1][0]
            if record.turn is None or not last.startswith("tool "):
                return self._fail(record, f"did not answer in {last} within its limit")
            # Calls run side by side, and none of their answers came.
            made = {what for what, _ in takewhile(lambda begun: begun[0].startswith("tool "), reversed(record.begun))}
            for call in record.turn["calls"]:
                call["late"] |= f"tool {call['name']}" in made
        self._run(record)

    # ── messages of processes ────────────────────────────────────────────────

    def _read(self, worker: Process) -> None:
        lines, ended = worker.read_lines()
        for line in lines:
            if worker in self._workers:
                self._hear(worker, json.loads(line))
        if ended and worker in self._workers:
            self._died(worker)

    def _hear(self, worker: Process, message: dict[str, Any]) -> None:
        if "ready" in message:
            worker.ready = True
        elif "loading" in message:
            worker.ready, worker.spawned = not message["loading"], time.monotonic()
        elif "hangs" in message:
            log.warning("a process of environments ends, as %s goes on beyond its limit", message["hangs"])
            for record in self._replace(worker):
                self._run(record)
        elif (record := self._asked.get(message["id"])) is None:
            pass  # closed meanwhile
        elif "begins" in message:
            record.begun.append((message["begins"], message["end"]))
        elif "failure" in message:
            self._fail(record, message["failure"])
        else:
            self._answer(record, message["reply"])

    def _answer(self, record: Record, reply: dict[str, Any]) -> None:
        if record.do == "check":
            record.said.append(reply["hello"])
            return self._settle(record)
        why = reply.pop("unsaved", "")
        if why and record.opening.name not in self._unsaved:
            self._unsaved.add(record.opening.name)
            log.warning(
                "the environment %s cannot be saved, and is run again from its reset instead: %s",
                record.opening.name,
                why,
            )
        record.keep(reply)
        self._done.append((record.key, Reply(**reply)))
        self._settle(record)

    def _died(self, worker: Process) -> None:
        how = worker.end()
        if not worker.ready and not any(record.worker is worker for record in self._asked.values()):
            raise PoolError(f"a process for environments ended {how} before it was ready: its output stands above")
        for record in self._replace(worker):
            record.deaths += 1
            if record.deaths >= DEATHS:
                self._fail(record, f"ended its process {how}, twice, in {record.do}")
            else:
                self._suspects.append(record)
        log.warning("a process of environments ended %s and is replaced", how)
        if self._suspect is None and self._suspects:
            self._suspect = self._suspects.popleft()
            self._run(self._suspect)

    def _replace(self, worker: Process) -> list[Record]:
        """Put a fresh process in the place of one, and return the records whose requests were under way there."""
        worker.kill()
        self._workers[self._workers.index(worker)] = self._spawn()
        lost = [record for record in self._asked.values() if record.worker is worker]
        for record in (*self._records.values(), *lost):
            if record.worker is worker:
                record.worker = None
        return lost
