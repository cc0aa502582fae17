"""Runs environments in processes that can be killed, so that faulty code fails only its own conversation.

The caller's side uses neither threads nor pickle: it exchanges JSON lines with each process over non-blocking pipes.
Each process enforces the time limits of its calls; the pool kills a process that fails to do so.
"""

import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from spmdrl.env.base import AssistantTurn, Opening, PoolSettings, Reply
from spmdrl.env.records import Host, Hosts, PoolError, Record
from spmdrl.workers.processes import START_SECONDS

DEATHS = 2
"""If a request's process dies this many times, the environment is considered the cause."""
log = logging.getLogger("spmdrl")


class Pool:
    """A pool of environments that are open in `workers` processes. Only the thread that creates a pool may use it, and
    the processes die with this thread.

    Each environment works on one request at a time; `poll` returns the replies. A failed environment answers every
    later request with its failure until it is closed.

    When a call exceeds its time limit and cannot be cancelled, its environment is reopened, by `restore` or by
    replaying its turns, and the current turn is rerun without the call. If the call is still running a second later,
    its process finishes its current requests, takes no new ones, and exits. When a process dies or hangs, the requests
    that may have caused this are rerun one at a time to find the culprit.
    """

    def __init__(self, workers: int, settings: PoolSettings | None = None):
        """Start the processes, without waiting for them."""
        if workers < 1:
            raise ValueError(f"the number of processes for environments must be 1 or more, not {workers}")
        self.tools: dict[str, list[str]] = {}
        """Tool names of each environment that `check` loaded, excluding tools that are added in `reset`."""
        self._next = 0
        self._records: dict[Hashable, Record] = {}  # records of the open environments, by the caller's key
        self._under_way: dict[int, Record] = {}  # records with an unanswered request, by request number
        self._suspects: deque[Record] = deque()  # records whose process died or hung; they wait to run one by one
        self._suspect: Record | None = None  # the suspect whose request is running
        self._done: list[tuple[Any, Reply]] = []
        self._unsaved: set[str] = set()  # names of environments whose state could not be saved
        self._processes = Hosts(workers, settings or PoolSettings(), self)

    # ── requests ─────────────────────────────────────────────────────────────

    @property
    def pending(self) -> int:
        """Return the number of replies that `poll` has not returned yet."""
        return len(self._under_way) + len(self._done)

    def check(self, name: str, settings: dict[str, Any] | None = None) -> str:
        """Make an environment once to check that it works. Return a description of the environment for the log.

        Raises:
            ValueError: no environment has this name, or it cannot be created with these settings.
        """
        key = object()
        record = self._records[key] = Record(key, self._next, Opening(name, {}, 0, settings or {}))
        self._request(record, "check")
        while record.request >= 0:
            self._processes.turn(0.2)
        self.close(key)
        if record.failure:
            raise ValueError(record.failure)
        return record.state

    def open(self, key: Hashable, opening: Opening, replayed: Sequence[AssistantTurn] = (), state: Any = None) -> None:
        """Reset an environment, then restore it to `state`, or replay the turns in `replayed` if `state` is None.

        key: identifies the environment in all later calls and in messages, such as (prompt, sample).
        """
        assert key not in self._records, f"{key} is open"
        turns = list(replayed) if state is None else []
        record = self._records[key] = Record(key, self._next, opening, state=state, turns=turns)
        self._request(record, "open")

    def say(self, key: Hashable, turn: AssistantTurn) -> None:
        """Run an assistant turn: first make its calls, in parallel if the environment allows it, and then call `step`.

        Sets `late` in the calls of `turn` that exceed their time limit, so that a replay does not repeat them.
        """
        self._request(self._records[key], "say", turn)

    def score(self, key: Hashable) -> None:
        """Request the final reward, which `poll` returns."""
        self._request(self._records[key], "score")

    def state(self, key: Hashable) -> Any:
        """Return the environment's state after the last reply, a JSON value that `open` can restore.

        While a turn is running, this is the state before the turn, so the turn must be sent again after the state is
        restored. Return None if the environment must be reopened by replaying its turns.
        """
        record = self._records[key]
        return None if record.turns or record.failure else record.state

    def close(self, key: Hashable) -> None:
        """Close an environment, and drop its running request and the replies that `poll` has not returned."""
        record = self._records.pop(key)
        self._done = [(other, reply) for other, reply in self._done if other != key]
        if record in self._suspects:
            self._suspects.remove(record)
        if record.worker is not None:
            self._processes.send(record.worker, {"do": "close", "env": record.number})
        self._detach(record)
        self._end(record)

    def poll(self, wait: float = 0.0) -> list[tuple[Any, Reply]]:
        """Return (key, reply) for all replies so far. Wait up to `wait` seconds for the first if requests are running.

        Raises:
            PoolError: a process could not be started.
        """
        until = time.monotonic() + wait
        self._processes.turn(0.0)
        while self._under_way and not self._done and (left := until - time.monotonic()) > 0:
            self._processes.turn(left)
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        """Shut down the processes, after giving environments a short time to clean up. May be called twice."""
        self._processes.shutdown()
        self._records, self._under_way, self._done = {}, {}, []

    # ── sending ──────────────────────────────────────────────────────────────

    def _request(self, record: Record, do: str, turn: AssistantTurn | None = None) -> None:
        assert record.request < 0, f"{record.key} is working on another request"
        if record.failure:
            self._done.append((record.key, Reply(failure=record.failure)))
            return
        record.do, record.turn, record.deaths, record.since = do, turn, 0, time.monotonic()
        self._run(record)

    def _run(self, record: Record, process: Host | None = None) -> None:
        """Send a record's request to its process.

        If the record has no process, it is assigned to `process`, by default to the one with the fewest environments.
        """
        self._under_way.pop(record.request, None)
        record.request, record.begun, record.run_at = self._next, [], time.monotonic()
        self._next += 1
        self._under_way[record.request] = record
        message, opened = record.message(), record.worker is not None
        if not opened:
            record.worker = self._processes.enter(process)
        assert record.worker
        try:
            self._processes.send(record.worker, message)
        except (TypeError, ValueError) as e:
            if not opened:
                self._detach(record)
            self._fail(record, f"cannot be used: its row, settings, turns or state are not JSON: {e}")

    def _detach(self, record: Record) -> None:
        """Detach a record from its process, so that its next request reopens the environment."""
        process, record.worker = record.worker, None
        if process is not None:
            self._processes.leave(process)

    def _end(self, record: Record) -> None:
        """Mark a record's request as finished, and run the next request in `_suspects`."""
        self._under_way.pop(record.request, None)
        record.request, record.turn = -1, None
        if record.worker is not None and record.worker.retired:
            self._detach(record)
        if record is self._suspect:
            self._suspect = None
        self._next_suspect()

    def _next_suspect(self) -> None:
        """Run the next request whose process died or hung. Only one of these requests runs at a time."""
        if self._suspect is None and self._suspects:
            self._suspect = self._suspects.popleft()
            self._run(self._suspect)

    def _fail(self, record: Record, why: str) -> None:
        record.failure = record.failed(why)
        self._done.append((record.key, Reply(failure=record.failure)))
        self._end(record)

    # ── messages and ends of processes ───────────────────────────────────────

    def on_message(self, process: Host, message: dict[str, Any]) -> None:
        """Handle a line that a process sent."""
        if "hangs" in message:
            self._retire(process, message["hangs"])
        elif (record := self._under_way.get(message["id"])) is None:
            pass  # the environment of this request was closed before the line arrived
        elif "begins" in message:
            record.note_call(message)
        elif "anew" in message:
            record.mark_late(message["anew"])
            self._detach(record)
            self._run(record)
        elif "failure" in message:
            self._fail(record, message["failure"])
        else:
            self._answer(record, message["reply"])

    def deadline(self, process: Host) -> float:
        """Return the earliest deadline of a process's requests (time.monotonic())."""
        return min(
            (record.end for record in self._under_way.values() if record.worker is process), default=float("inf")
        )

    def on_timeout(self, process: Host) -> None:
        """Replace a process whose event loop hangs, because an async function blocks it or a call holds the GIL."""
        under_way = self._replace(process)
        if not process.ready and not under_way:
            raise PoolError(f"a process that runs environments did not start within {START_SECONDS:.0f} s")
        innocent, late = [], [record for record in under_way if record.end < time.monotonic()]
        for record in under_way:
            if record in late and (record is self._suspect or len(late) == 1):
                self._drop_late_calls(record)
            elif record in late:
                # One call blocked all requests of the process. Each request is rerun alone, to find the culprit.
                self._suspects.append(record)
            elif process.ready or record.begun:
                innocent.append(record)
            else:
                self._fail(record, f"was not loaded within {START_SECONDS:.0f} s")
        self._next_suspect()
        # The other requests are rerun in a separate process, which takes no new requests that could disturb them.
        aside = self._processes.aside() if innocent else None
        for record in innocent:
            self._run(record, aside)

    def on_exit(self, process: Host, how: str) -> None:
        """Replace a process that exited on its own, and rerun its open requests.

        The requests are rerun one at a time, unless a call hung in the process.
        """
        under_way = self._replace(process)
        if not process.ready and not under_way:
            raise PoolError(f"a process that runs environments ended {how} before it was ready: see its output above")
        if not process.hung:
            log.warning("a process that runs environments ended %s and is replaced", how)
        for record in under_way:
            record.deaths += not process.hung
            if process.hung:  # the process was retired, and exited before it read this request
                self._run(record)
            elif record.deaths >= DEATHS:
                self._fail(record, f"ended its process {how}, twice, in {record.do}")
            else:
                self._suspects.append(record)
        self._next_suspect()

    def _drop_late_calls(self, record: Record) -> None:
        """Rerun a request without the calls that had exceeded their time limits when the process was killed."""
        what, _, call = record.begun[-1]
        if record.turn is None or call < 0:
            return self._fail(record, f"did not answer in {what} within its limit")
        record.mark_late(i for _, _, i in record.begun)  # these calls run in parallel, and none of them has answered
        self._run(record)

    def _answer(self, record: Record, reply: dict[str, Any]) -> None:
        if record.do == "check":
            record.state, self.tools[record.opening.name] = reply["hello"], reply["tools"]
            return self._end(record)
        if (why := reply.pop("unsaved", "")) and record.opening.name not in self._unsaved:
            self._unsaved.add(record.opening.name)
            log.warning(
                "the environment %s cannot be saved (%s): its turns are run again instead", record.opening.name, why
            )
        record.take_reply(reply)
        self._done.append((record.key, Reply(**reply)))
        self._end(record)

    def _retire(self, process: Host, what: str) -> None:
        """Send no more requests to a process in which a call hangs. The process exits after its current requests."""
        if not process.hung:
            log.warning("a process that runs environments is replaced: %s still runs after its time limit", what)
            self._processes.retire(process)
            for record in self._records.values():
                if record.worker is process and record.request < 0:
                    self._detach(record)

    def _replace(self, process: Host) -> list[Record]:
        """Replace a process with a new one, and return the records of its unanswered requests."""
        self._processes.replace(process)
        there = [record for record in self._records.values() if record.worker is process]
        for record in there:
            record.worker = None
        return [record for record in there if record.request in self._under_way]
