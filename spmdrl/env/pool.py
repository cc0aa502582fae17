"""Environments in processes that can be killed: whatever their code does, a conversation goes on or fails alone.

No threads and no pickle on the caller's side: each process is spoken to in JSON lines over pipes that never block. Time
limits are kept by the processes themselves; a process that does not even do that is killed by the pool's clock.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from spmdrl.env.base import AssistantTurn, Opening, PoolSettings, Reply
from spmdrl.env.processes import Host, Hosts, PoolError
from spmdrl.env.records import Record, wired
from spmdrl.workers.processes import START_SECONDS

DEATHS = 2
"""Times that a process may die during one request before the environment counts as the cause."""
log = logging.getLogger("spmdrl")


class Pool:
    """Open environments in `workers` processes. Use it from one thread (the processes die with it).

    Each environment works on one request at a time; `poll` gives the answers. An environment that failed answers every
    further request with its failure, and is forgotten at `close` like any other.

    When a call goes on beyond its limit, its environment is opened anew, by `restore` or by running its turns again,
    and the turn is run again without the call. A second later the process of the call ends, after the requests under
    way in it. Where a process dies or stands still, its requests run again one by one, to find the one at fault.
    """

    def __init__(self, workers: int, settings: PoolSettings | None = None):
        """Start the processes, without waiting for them."""
        if workers < 1:
            raise ValueError(f"{workers} processes for environments: there must be 1 at least")
        self.tools: dict[str, list[str]] = {}
        """Environment that was checked -> names of those of its tools that are known before a reset."""
        self._next = 0
        self._records: dict[Hashable, Record] = {}  # by key
        self._asked: dict[int, Record] = {}  # by number of the request: all that are under way
        self._suspects: deque[Record] = deque()  # whose process died or stood still, which wait to run one by one
        self._suspect: Record | None = None  # the one that runs
        self._done: list[tuple[Any, Reply]] = []
        self._unsaved: set[str] = set()  # names of environments whose state could not be saved
        self._processes = Hosts(workers, settings or PoolSettings(), self)

    # ── requests ─────────────────────────────────────────────────────────────

    @property
    def pending(self) -> int:
        """Answers that `poll` has not given yet."""
        return len(self._asked) + len(self._done)

    def check(self, name: str, settings: dict[str, Any] | None = None) -> str:
        """Return what an environment's name stands for, in words, after making one. Waits for it.

        Raises:
            ValueError: there is none, or it cannot be made with these settings.
        """
        hello: list[str] = []  # where the answer goes
        record = Record(object(), -1, Opening(name, {}, 0, settings or {}), original=hello)
        self._ask(record, "check")
        while not hello and not record.failure:
            self._processes.turn(0.2)
        self._leave(record)
        if hello:
            return hello[0]
        raise ValueError(f"the environment {name} {record.failure}")

    def open(self, key: Hashable, opening: Opening, replayed: Sequence[AssistantTurn] = (), state: Any = None) -> None:
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
                record.turns = [wired(turn) for turn in replayed]
        except (TypeError, ValueError) as e:
            return self._fail(record, f"cannot be opened: its row, settings, turns or state are no JSON: {e}")
        self._ask(record, "open")

    def say(self, key: Hashable, turn: AssistantTurn) -> None:
        """Hand over a turn of the assistant: its calls are made, side by side, and then `step`.

        `late` is set in those calls of `turn` that do not answer in time, so that a replay does not make them again.
        """
        record = self._records[key]
        record.original, record.turn = turn, wired(turn)
        self._ask(record, "say")

    def score(self, key: Hashable) -> None:
        """Ask for the final reward."""
        self._ask(self._records[key], "score")

    def state(self, key: Hashable) -> Any:
        """Return the state after the last answer, from which `open` goes on; a JSON value.

        While a turn is under way, it is the state before that turn, which is to be sent again. None where the
        environment is to be opened with its turns.
        """
        record = self._records[key]
        return json.loads(record.state) if record.state and not record.turns and not record.failure else None

    def close(self, key: Hashable) -> None:
        """Close an environment and forget it, with a request that is under way and answers that were not fetched."""
        record = self._records.pop(key)
        self._done = [(other, reply) for other, reply in self._done if other != key]
        if record in self._suspects:
            self._suspects.remove(record)
        self._asked.pop(record.request, None)
        if record.worker is not None:
            self._processes.send(record.worker, {"do": "close", "env": record.number})
        self._leave(record)
        self._settle(record)

    def poll(self, wait: float = 0.0) -> list[tuple[Any, Reply]]:
        """Return the answers that came, waiting up to `wait` seconds for the first where some are owed.

        Raises:
            PoolError: a process could not be started.
        """
        until = time.monotonic() + wait
        self._processes.turn(0.0)
        while self._asked and not self._done and (left := until - time.monotonic()) > 0:
            self._processes.turn(left)
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        """End the processes: environments get a moment to clear up. May be called twice."""
        self._processes.shutdown()
        self._records, self._asked, self._done = {}, {}, []

    # ── sending ──────────────────────────────────────────────────────────────

    def _ask(self, record: Record, do: str) -> None:
        """Begin a request of an environment."""
        assert record.request < 0, f"{record.key} works on another request"
        if record.failure:
            record.turn = None
            self._done.append((record.key, Reply(failure=record.failure)))
            return
        record.do, record.deaths, record.since = do, 0, time.monotonic()
        try:
            json.dumps(record.turn)
        except (TypeError, ValueError) as e:
            return self._fail(record, f"got a turn that is no JSON: {e}")
        self._run(record)

    def _run(self, record: Record, process: Host | None = None) -> None:
        """Send a record's request; where it is in no process, to this one, or to that with the fewest environments."""
        self._asked.pop(record.request, None)
        record.request, record.begun, record.run_at = self._next, [], time.monotonic()
        self._next += 1
        self._asked[record.request] = record
        message = record.message()
        if record.worker is None:
            record.worker = self._processes.enter(process)
        self._processes.send(record.worker, message)

    def _leave(self, record: Record) -> None:
        """Detach a record from its process."""
        process, record.worker = record.worker, None
        if process is not None:
            self._processes.leave(process)

    def _settle(self, record: Record) -> None:
        """End a record's request; the next suspect may run."""
        self._asked.pop(record.request, None)
        record.request, record.turn, record.original = -1, None, None
        if record.worker is not None and record.worker.retired:
            self._leave(record)
        if record is self._suspect:
            self._suspect = None
        self._next_suspect()

    def _next_suspect(self) -> None:
        """Run the next request whose process died, if none runs."""
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

    # ── what processes say and do ────────────────────────────────────────────

    def hear(self, process: Host, message: dict[str, Any]) -> None:
        """Take a line of a process."""
        if "hangs" in message:
            self._retire(process, message["hangs"])
        elif (record := self._asked.get(message["id"])) is None:
            pass  # closed meanwhile
        elif "begins" in message:
            record.begin(message)
        elif "anew" in message:
            record.late(message["anew"])
            self._leave(record)
            self._run(record)
        elif "failure" in message:
            self._fail(record, message["failure"])
        else:
            self._answer(record, message["reply"])

    def deadline(self, process: Host) -> float:
        """When a process should have answered the first of its requests."""
        return min((record.end for record in self._asked.values() if record.worker is process), default=float("inf"))

    def stuck(self, process: Host) -> None:
        """Replace a process whose loop stands still: an async function blocks, or a call lets no other thread run."""
        under_way = self._replace(process)
        if not process.ready and not under_way:
            raise PoolError(f"a process for environments did not start within {START_SECONDS:.0f} s")
        innocent, late = [], [record for record in under_way if record.end < time.monotonic()]
        for record in under_way:
            if record in late and (record is self._suspect or len(late) == 1):
                self._late(record)
            elif record in late:
                # One call held up all requests of the process: each runs again alone, which shows the one at fault.
                self._suspects.append(record)
            elif process.ready or record.begun:
                innocent.append(record)
            else:
                self._fail(record, f"was not loaded within {START_SECONDS:.0f} s")
        self._next_suspect()
        # The innocent run again in a process of their own, which takes no new requests that could disturb them.
        aside = self._processes.aside() if innocent else None
        for record in innocent:
            self._run(record, aside)

    def died(self, process: Host, how: str) -> None:
        """Replace a process that ended by itself, and run its requests again one by one."""
        under_way = self._replace(process)
        if not process.ready and not under_way:
            raise PoolError(f"a process for environments ended {how} before it was ready: its output stands above")
        if not process.hung:
            log.warning("a process of environments ended %s and is replaced", how)
        for record in under_way:
            record.deaths += not process.hung
            if process.hung:  # it ended as it should, before it read this request
                self._run(record)
            elif record.deaths >= DEATHS:
                self._fail(record, f"ended its process {how}, twice, in {record.do}")
            else:
                self._suspects.append(record)
        self._next_suspect()

    def _late(self, record: Record) -> None:
        """Run a request again without the calls whose limits were over when its process was killed."""
        what, _, call = record.begun[-1]
        if record.turn is None or call < 0:
            return self._fail(record, f"did not answer in {what} within its limit")
        record.late(i for _, _, i in record.begun)  # they run side by side, and none of their answers came
        self._run(record)

    def _answer(self, record: Record, reply: dict[str, Any]) -> None:
        if record.do == "check":
            record.original.append(reply["hello"])
            self.tools[record.opening.name] = reply["tools"]
            return self._settle(record)
        why, name = reply.pop("unsaved", ""), record.opening.name
        if why and name not in self._unsaved:
            self._unsaved.add(name)
            log.warning("the environment %s cannot be saved, and is run again from its reset instead: %s", name, why)
        record.keep(reply)
        self._done.append((record.key, Reply(**reply)))
        self._settle(record)

    def _retire(self, process: Host, what: str) -> None:
        """Let a process end in which a call hangs, with the requests that are under way there."""
        if not process.hung:
            log.warning("a process of environments takes no more of them and ends: %s goes on beyond its limit", what)
            self._processes.retire(process)
            for record in self._records.values():
                if record.worker is process and record.request < 0:
                    self._leave(record)

    def _replace(self, process: Host) -> list[Record]:
        """Put a fresh process in the place of one, and return the records whose requests were under way there."""
        self._processes.replace(process)
        lost = [record for record in self._asked.values() if record.worker is process]
        for record in (*self._records.values(), *lost):
            if record.worker is process:
                record.worker = None
        return lost
