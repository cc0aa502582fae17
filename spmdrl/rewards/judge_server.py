"""Questions to a judge behind a URL: attempts, votes, costs.

Requests wait for the network and for nothing else, so threads send them. What they find goes through a queue to the one
thread that asks, which alone puts answers together.
"""

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable

from spmdrl.config.judge import JudgeConfig
from spmdrl.data.keys import describe
from spmdrl.health.status import tick
from spmdrl.rewards.base import RewardError, UngradedError
from spmdrl.rewards.judge_asker import Answer, Case, Counters
from spmdrl.rewards.judge_cache import Cache
from spmdrl.rewards.judge_client import Client, TryAgainError, UnknownFormError
from spmdrl.rewards.judge_verdict import FORMATS, BadVerdictError, Question, Verdict, content_of, new_nonce, tokens_of

FIRST_PAUSE = 1.0
"""Seconds before the second attempt, on average; each further pause is twice as long."""
LONGEST_PAUSE = 60.0
log = logging.getLogger("spmdrl")


class Server:
    """Asks a server of chat completions. Use it from one thread.

    After a RewardError nothing but `close` has a meaning.
    """

    on_engine = False

    def __init__(self, cfg: JudgeConfig, name: str):
        """Nothing is sent before the first question. name: what messages call the judge.

        Raises:
            ValueError: a cache or a key that cannot be used; the message names the setting.
        """
        self.name = name
        self.spent = Counters()
        self._cfg = cfg
        self._client = Client(cfg.url, os.environ.get(cfg.key_env, ""), cfg.key_env, cfg.timeout)
        self._cache = Cache(cfg.cache) if cfg.cache else None
        self._open: set[Case] = set()
        self._done: list[tuple[object, Answer]] = []
        self._failure = ""
        self._work: queue.SimpleQueue[tuple[Case, int, int] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Case, int, int, Verdict | Exception]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        # Of its own: pauses must not move the draws of others.
        self._jitter = random.Random()
        # Shared by the threads, under the lock: counters, the way to ask for JSON, and when the server may be asked.
        self._lock = threading.Lock()
        self._form = 0
        self._not_before = 0.0

    @property
    def pending(self) -> int:
        """Cases submitted and not yet answered."""
        return len(self._open)

    def submit(self, key: object, *questions: Question, response: object = None) -> None:
        """Take questions that are of use only together, without waiting.

        key: comes back with the answer. response: key by which messages name it, if that is another.
        """
        case = Case(key, key if response is None else response, questions)
        self._open.add(case)
        for i in range(len(questions)):
            for vote in range(self._cfg.votes):
                self._work.put((case, i, vote))
                if len(self._threads) < self._cfg.concurrency:
                    # A request that hangs must not keep a job from ending.
                    self._threads.append(threading.Thread(target=self._serve, name="judge", daemon=True))
                    self._threads[-1].start()

    def poll(self) -> list[tuple[object, Answer]]:
        """Answers since the last call, without waiting. Raises RewardError."""
        self._take(0.0)
        done, self._done = self._done, []
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Wait for all that was submitted, or until `stop()`, asked once a second; answers since the last call.

        Raises RewardError.
        """
        while self._open and not (stop and stop()):
            self._take(1.0)
        return self.poll()

    def close(self) -> None:
        """Cut all requests and end the threads. May be called twice."""
        if self._threads:
            log.info("%s: %s", self.name, ", ".join(f"{name} {n:,}" for name, n in vars(self.spent).items()))
        self._ended.set()
        self._client.close()
        for _ in self._threads:
            self._work.put(None)
        self._threads = []

    # -- the caller's thread --------------------------------------------------------------------------------------

    def _take(self, patience: float) -> None:
        """Take what the threads have found, waiting for the first of it for so many seconds."""
        # A sign of life: a request that hangs is ended by its own clock.
        tick()
        until = time.monotonic() + patience
        while not self._failure:
            try:
                self._hear(*self._found.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                return
            until = 0.0
        raise RewardError(self._failure)

    def _hear(self, case: Case, question: int, vote: int, found: Verdict | Exception) -> None:
        if case.over:
            return
        if isinstance(found, Verdict):
            case.verdicts[question, vote] = found
            if len(case.verdicts) == len(case.questions) * self._cfg.votes:
                self._answer(case, case.answer(self._cfg.votes))
        elif isinstance(found, UngradedError):
            self._answer(case, str(found))
        else:
            what = str(found) if isinstance(found, RewardError) else f"{type(found).__name__}: {found}"
            self._failure = (
                f"reward function {self.name} failed on {describe(case.response)}: {self._client.without_key(what)}"
            )

    def _answer(self, case: Case, answer: Answer) -> None:
        case.over = True
        self._open.discard(case)
        self._done.append((case.key, answer))

    # -- the threads ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._work.get()) is not None and not self._ended.is_set():
            case, question, vote = work
            try:
                found: Verdict | Exception = self._verdict(case, case.questions[question], vote)
            except Exception as error:
                # The one who polls raises it.
                found, case.failed = error, True
            self._found.put((case, question, vote, found))
            if not isinstance(found, Verdict | UngradedError):
                # The job ends: nothing more is to be paid for.
                self._ended.set()

    def _verdict(self, case: Case, asked: Question, vote: int) -> Verdict:
        """Return a verdict, from the cache or from as many attempts as there may be.

        Raises:
            UngradedError: none of them gave one.
            RewardError: no request can succeed, or the budget is spent.
        """
        place = asked.digest(vote) if self._cache else ""
        if self._cache and (known := self._cache.read(place, asked.read)):
            self._count(cached=1)
            return known
        why = ""
        for attempt in range(1 + self._cfg.retries):
            if case.failed:
                break
            after = None
            try:
                content = self._asked(asked, attempt)
                verdict = asked.read(content)
                if self._cache:
                    self._cache.write(place, content)
                return verdict
            except BadVerdictError as error:
                self._count(bad_verdicts=1)
                why = str(error)
            except TryAgainError as error:
                why, after = str(error), error.after
            if attempt < self._cfg.retries:
                self._pause(attempt, after)
        why = why or "another of its votes failed"
        raise UngradedError(f"the judge gave no verdict in {1 + self._cfg.retries} attempts, at last because {why}")

    def _asked(self, asked: Question, attempt: int) -> str:
        """Return the judge's own words; where the server does not know a way to ask for JSON, the next one is taken."""
        for form in range(self._form, len(FORMATS)):
            self._wait()
            self._spend(repeated=int(attempt > 0 or form > self._form))
            try:
                answer = self._client.ask(asked.body(new_nonce(), form))
            except UnknownFormError as error:
                if form == len(FORMATS) - 1:
                    # Not for the way it asks: the text itself is refused, too long as a rule.
                    raise UngradedError(str(error)) from None
                continue
            with self._lock:
                self._form = max(self._form, form)
            self._count(**tokens_of(answer))
            return content_of(answer)
        raise AssertionError("the last form returns or raises")

    def _spend(self, repeated: int) -> None:
        with self._lock:
            if self._cfg.budget and self.spent.calls >= self._cfg.budget:
                raise RewardError(
                    f"the {self._cfg.budget:,} calls of the judge's budget are spent: raise it (0: no bound), lower "
                    "its votes, or keep answers in its cache; the run goes on from its last checkpoint"
                )
            self.spent.calls += 1
            self.spent.repeated += repeated

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                setattr(self.spent, name, getattr(self.spent, name) + n)

    def _pause(self, attempt: int, after: float | None) -> None:
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * self._jitter.uniform(0.5, 1.5)
        if after is not None:
            # A rate limit is everybody's: nobody asks before it ends.
            with self._lock:
                self._not_before = max(self._not_before, time.monotonic() + after)
            seconds = min(seconds, FIRST_PAUSE) + after
        self._ended.wait(seconds)

    def _wait(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._ended.wait(left):
            pass
        if self._ended.is_set():
            raise UngradedError("the judge was closed")
