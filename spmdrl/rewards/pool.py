"""A grader that runs reward functions in worker processes that can be killed.

If a reward function hangs or crashes, the run continues or stops with a clear message. Each worker is a plain child
process that exchanges JSON lines over non-blocking pipes. Workers measure the grading time themselves, so results do
not depend on how often the caller polls.
"""

import json
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spmdrl.data.scores import describe
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput
from spmdrl.workers import processes
from spmdrl.workers.processes import Process, Processes

PREFETCH = 8
"""Maximum number of requests queued per worker, to keep it busy until the caller polls again."""
log = logging.getLogger("spmdrl")


@dataclass(eq=False)
class Worker(Process):
    """A worker process and the requests sent to it."""

    queue: deque[int] = field(default_factory=deque)
    """Ids of unanswered requests in order of sending; the worker might be grading the first."""
    started: float | None = None
    """Start time of the current grading call (time.monotonic()), or None when idle."""
    may_take: float = 0.0
    """Maximum seconds for the current grading call if its reward has time limits of its own, else 0."""


class Pool(Grader):
    """Grader that uses `workers` processes, which die with the thread that started them."""

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
        """Start the workers and wait until each has loaded the function.

        function: `builtin:<name>` or `/absolute/file.py:name`. on_timeout: `error` or `zero`. finite: if True, a
        non-finite score is an error. settings: JSON-serialisable settings of a built-in reward, or additional arguments
        for a function in a file. alone: True if this is the run's only reward. Raises ValueError if a worker cannot
        load the function.
        """
        assert on_timeout in ("error", "zero"), on_timeout
        if workers < 1 or not timeout > 0:
            raise ValueError(f"--reward.workers is {workers} and --reward.timeout {timeout}: both must be above 0")
        super().__init__(name or function)
        self._timeout, self._on_timeout = timeout, on_timeout
        self._note, self._alone = "", alone
        self._next = 0
        self._items: dict[int, tuple[object, bytes]] = {}  # unanswered requests: id -> (key, request line)
        self._waiting: deque[int] = deque()  # ids of requests not sent to a worker yet
        hello = {"function": function, "settings": settings or {}, "finite": finite}
        self._processes = Processes(workers, Worker, "spmdrl.rewards.worker", hello, self)
        try:
            while not all(worker.ready for worker in self._processes.all):
                self._processes.turn(1.0)
        except RewardError as e:
            self.close()
            raise ValueError(str(e)) from None

    def submit(self, key: object, item: RewardInput) -> None:
        """Submit one response. Raises RewardError if its ground truth or extra columns are not JSON-serialisable."""
        values = [item.data_source, item.solution, item.ground_truth, item.extra, item.prompt, item.prefill]
        try:
            line = (json.dumps({"id": self._next, "item": values}) + "\n").encode()
        except (TypeError, ValueError) as e:
            raise RewardError(
                f"{describe(key)}: its ground truth or extra columns cannot be written as JSON: {e}"
            ) from e
        self._items[self._next] = (key, line)
        self.pending += 1
        self._waiting.append(self._next)
        self._next += 1
        self._hand_out()

    def close(self) -> None:
        """Stop the workers, killing those that have pending requests. Can be called repeatedly."""
        for worker in self._processes.all:
            if worker.queue:
                worker.kill()
        self._processes.shutdown()

    def _turn(self, wait: float) -> None:
        self._processes.turn(wait)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send waiting requests to the workers with the shortest queues."""
        while self._waiting:
            open_to = [w for w in self._processes.all if w.ready and len(w.queue) < PREFETCH]
            if not open_to:
                break
            worker = min(open_to, key=lambda w: len(w.queue))
            request = self._waiting.popleft()
            worker.queue.append(request)
            worker.to_send += self._items[request][1]
        for worker in self._processes.all:
            if worker.to_send:
                worker.flush()

    # -- events of workers ------------------------------------------------------------------------------------------

    def on_message(self, worker: Worker, message: dict) -> None:
        """Handle a message from a worker: a note, a load failure, the start of a grading call, or its result."""
        if "note" in message:
            if message["note"] and message["note"] != self._note:
                self._note = message["note"]
                log.info("reward function %s: %s", self.name, self._note)
        elif "failed" in message:
            raise RewardError(f"--reward.function {self.name}: {message['failed']}")
        elif "start" in message:
            assert worker.queue[0] == message["id"], "a worker must answer in order"
            worker.started, worker.may_take = message["start"], message["may_take"]
        else:
            request = worker.queue.popleft()
            assert request == message["id"], "a worker must answer in order"
            worker.started = None
            if message["seconds"] > (worker.may_take or self._timeout):  # the caller polled too late to kill it
                return self._timed_out(request, worker.may_take)
            if "error" in message:
                error = RewardError(
                    f"reward function {self.name} failed on {describe(self._items[request][0])}: {message['error']}. "
                    "Fix the function (--reward.function), or the row's truth if the function cannot read it"
                )
                error.add_note(message["trace"])  # notes follow the traceback, so that the message stays on one line
                raise error
            key, _ = self._items.pop(request)
            if "ungraded" in message:
                self._leave_out(key, message["ungraded"])
            elif self._alone and not message["applies"]:
                self._leave_out(key, "the function returned None: it does not apply to the row")
            else:
                self._answer(key, Reward(message["score"], message["parts"], applies=message["applies"]))

    def deadline(self, worker: Worker) -> float:
        """Return the deadline of the worker's current grading call as a time.monotonic() time, or infinity if idle."""
        return float("inf") if worker.started is None else worker.started + (worker.may_take or self._timeout)

    def on_timeout(self, worker: Worker) -> None:
        """Replace a worker whose grading call timed out, and requeue its other requests.

        Raises RewardError if the worker did not load in time, or if `on_timeout` was set to `error`.
        """
        if not worker.ready:
            raise RewardError(f"--reward.function {self.name} did not load within {processes.START_SECONDS:.0f} s")
        request = worker.queue.popleft()
        self._waiting.extendleft(reversed(worker.queue))
        self._processes.replace(worker)
        self._timed_out(request, worker.may_take)

    def on_exit(self, worker: Worker, how: str) -> None:
        """Raise RewardError, because a reward function must not exit its process."""
        if not worker.ready:
            raise RewardError(f"--reward.function {self.name}: its process ended {how} while loading")
        under_way = worker.started is not None
        when = f"while grading {describe(self._items[worker.queue[0]][0])}" if under_way else "between two gradings"
        raise RewardError(
            f"the process of reward function {self.name} ended {how} {when}: a reward function must return, not "
            "exit (--reward.function); its output is above, in this rank's log"
        )

    def _timed_out(self, request: int, may_take: float) -> None:
        key = self._items[request][0]
        if may_take:
            # The reward's own time limits should have ended the call, so the response is not to blame.
            self._items.pop(request)
            return self._leave_out(key, f"its grading did not end within {may_take:g} s")
        if self._on_timeout == "error":
            raise RewardError(
                f"reward function {self.name} took longer than {self._timeout:g} s on {describe(key)} and was stopped: "
                "make it faster, raise --reward.timeout, or score such samples 0 with --reward.on-timeout zero"
            )
        self.timeouts += 1
        self._answer(self._items.pop(request)[0], Reward(0.0, timed_out=True))
