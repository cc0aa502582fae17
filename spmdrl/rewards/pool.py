"""Graders in processes that can be killed: whatever a reward function does, the run goes on or ends with a clear line.

No threads and no pickle: each worker is a plain child process, spoken to in JSON lines over pipes that never block the
caller. A grading's time is taken by its worker, from the moment it starts, so a caller that polls late changes nothing.
"""

import json
import logging
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from spmdrl.data.keys import describe
from spmdrl.health.status import tick
from spmdrl.rewards.base import Reward, RewardError, RewardInput, left_out
from spmdrl.rewards.process import Worker, spawn

START_SECONDS = 120.0
"""Longest a worker may take to import its function (a cold file system is slow)."""
PREFETCH = 8
"""Requests handed to a worker ahead of time, so that it works on while the caller is busy elsewhere."""
log = logging.getLogger("spmdrl")


class Pool:
    """Grader over `workers` processes. Use it from one thread (the workers die with the thread that started them).

    After a RewardError nothing but `close` has a meaning.
    """

    wants_groups = on_engine = False

    def __init__(
        self,
        function: str,
        workers: int,
        timeout: float,
        on_timeout: str,
        name: str = "",
        finite: bool = True,
        settings: dict[str, Any] | None = None,
        alone: bool = False,
    ):
        """function: `builtin:<name>` or `/absolute/file.py:name`. on_timeout: `error` or `zero`.

        finite: a score that is not finite is an error. settings: of a built-in reward, or further
        arguments of a function in a file, as JSON has them. alone: no other reward grades a row to which this one does
        not apply.

        Waits until every worker has loaded the function. Raises ValueError when one cannot.
        """
        assert on_timeout in ("error", "zero"), on_timeout
        if workers < 1 or not timeout > 0:
            raise ValueError(f"--reward.workers is {workers} and --reward.timeout {timeout}: both must be above 0")
        self.name = name or function
        self.timeouts = self.ungraded = 0
        self._hello = {"function": function, "settings": settings or {}, "finite": finite}
        self._timeout, self._on_timeout = timeout, on_timeout
        self._note, self._alone = "", alone
        self._next = 0
        self._items: dict[int, tuple[object, bytes]] = {}  # id -> key, request line: all unanswered requests
        self._waiting: deque[int] = deque()  # ids no worker has
        self._done: list[tuple[object, Reward]] = []
        self._selector = selectors.DefaultSelector()
        self._workers = [spawn(self._selector, self._hello) for _ in range(workers)]
        try:
            while not all(w.ready for w in self._workers):
                self._turn(wait=True)
        except RewardError as e:
            self.close()
            raise ValueError(str(e)) from None

    @property
    def pending(self) -> int:
        """Gradings submitted and not yet answered."""
        return len(self._items)

    def submit(self, key: object, item: RewardInput) -> None:
        """Take one response to grade. Raises RewardError when truth or extra cannot be written as JSON."""
        values = [item.data_source, item.solution, item.ground_truth, item.extra, item.prompt, item.prefill]
        try:
            line = (json.dumps({"id": self._next, "item": values}) + "\n").encode()
        except (TypeError, ValueError) as e:
            raise RewardError(
                f"{describe(key)}: its ground truth or extra columns cannot be written as JSON: {e}"
            ) from e
        self._items[self._next] = (key, line)
        self._waiting.append(self._next)
        self._next += 1
        self._hand_out()

    def poll(self) -> list[tuple[object, Reward]]:
        """Results since the last call, without waiting."""
        self._turn(wait=False)
        done, self._done = self._done, []
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for all that was submitted, or until `stop()`, asked once a second; results since the last call."""
        while self._items and not (stop and stop()):
            self._turn(wait=True)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the workers: those that work are killed. May be called twice."""
        for worker in self._workers:
            if worker.ready and not worker.queue:
                worker.leave()
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._selector.close()

    # -- one turn: read, check clocks, hand out -------------------------------------------------------------------

    def _turn(self, wait: bool) -> None:
        # A sign of life: a grading that hangs is ended by this pool's own clocks.
        tick()
        for key, events in self._selector.select(self._patience() if wait else 0):
            worker: Worker = key.data
            if worker not in self._workers:  # killed earlier in this turn
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._read(worker)
        for worker in list(self._workers):
            self._check_clock(worker)
        self._hand_out()

    def _patience(self) -> float:
        """Seconds until the next clock runs out, at most 1."""
        return min(1.0, max(0.0, min(self._deadline(w) for w in self._workers) - time.monotonic()))

    def _deadline(self, worker: Worker) -> float:
        if not worker.ready:
            return worker.spawned + START_SECONDS
        return float("inf") if worker.started is None else worker.started + (worker.may_take or self._timeout)

    def _check_clock(self, worker: Worker) -> None:
        if time.monotonic() < self._deadline(worker):
            return
        self._read(worker)  # the answer may lie in the pipe, when the caller comes late
        if worker not in self._workers or time.monotonic() < self._deadline(worker):
            return
        if not worker.ready:
            raise RewardError(f"--reward.function {self.name} did not load within {START_SECONDS:.0f} s")
        request = worker.queue.popleft()
        self._replace(worker)
        self._timed_out(request, worker.may_take)

    def _hand_out(self) -> None:
        """Give waiting requests to the workers that have the fewest."""
        while self._waiting:
            open_to = [w for w in self._workers if w.ready and len(w.queue) < PREFETCH]
            if not open_to:
                break
            worker = min(open_to, key=lambda w: len(w.queue))
            request = self._waiting.popleft()
            worker.queue.append(request)
            worker.to_send += self._items[request][1]
        for worker in self._workers:
            if worker.to_send:
                worker.flush()

    # -- messages of workers --------------------------------------------------------------------------------------

    def _read(self, worker: Worker) -> None:
        lines, ended = worker.read_lines()
        for line in lines:
            self._hear(worker, json.loads(line))
        if ended:
            self._died(worker)

    def _hear(self, worker: Worker, message: dict) -> None:
        if "ready" in message:
            worker.ready = True
            if message["note"] and message["note"] != self._note:
                self._note = message["note"]
                log.info("reward function %s: %s", self.name, self._note)
        elif "failed" in message:
            raise RewardError(f"--reward.function {self.name}: {message['failed']}")
        elif "load" in message:
            worker.ready, worker.spawned = False, message["load"]
        elif "start" in message:
            assert worker.queue[0] == message["id"], "a worker answers in order"
            worker.ready, worker.started, worker.may_take = True, message["start"], message["may_take"]
        else:
            request = worker.queue.popleft()
            assert request == message["id"], "a worker answers in order"
            worker.started = None
            if message["seconds"] > (worker.may_take or self._timeout):  # as if it had been seen, and killed, in time
                self._timed_out(request, worker.may_take)
            elif "ungraded" in message:
                self._left_out(request, message["ungraded"])
            elif "error" in message:
                error = RewardError(
                    f"reward function {self.name} failed on {describe(self._items[request][0])}: {message['error']}. "
                    "Mend it (--reward.function), or the row's truth if it cannot read that"
                )
                error.add_note(message["trace"])  # shown with the traceback; the message stays one line
                raise error
            elif self._alone and not message["applies"]:
                self._left_out(request, "the function returned None: it does not apply to the row")
            else:
                self._answer(request, Reward(message["score"], message["parts"], applies=message["applies"]))

    def _answer(self, request: int, reward: Reward) -> None:
        key, _ = self._items.pop(request)
        self._done.append((key, reward))

    def _timed_out(self, request: int, may_take: float) -> None:
        if may_take:
            # Its own clocks should have ended it: the fault is not the response's.
            return self._left_out(request, f"its grading did not end within {may_take:g} s")
        if self._on_timeout == "error":
            raise RewardError(
                f"reward function {self.name} took longer than {self._timeout:g} s on "
                f"{describe(self._items[request][0])} and was stopped: make it faster, raise --reward.timeout, or "
                "score such samples 0 with --reward.on-timeout zero"
            )
        self.timeouts += 1
        self._answer(request, Reward(0.0, timed_out=True))

    def _left_out(self, request: int, why: str) -> None:
        self.ungraded += 1
        self._answer(request, left_out(self.name, self._items[request][0], why, self.ungraded))

    def _died(self, worker: Worker) -> None:
        how = worker.end()
        if not worker.ready:
            raise RewardError(f"--reward.function {self.name}: its process ended {how} while loading")
        under_way = worker.started is not None
        when = f"while grading {describe(self._items[worker.queue[0]][0])}" if under_way else "between two gradings"
        raise RewardError(
            f"the process of reward function {self.name} ended {how} {when}: a reward function must return, not "
            "exit (--reward.function); its own output stands above, in this rank's log"
        )

    def _replace(self, worker: Worker) -> None:
        """Kill a worker, put a fresh one in its place, and give its untouched requests back."""
        worker.kill()
        self._waiting.extendleft(reversed(worker.queue))
        self._workers[self._workers.index(worker)] = spawn(self._selector, self._hello)
