"""A judge that runs on a server, with a cache folder that stores its answers by question hash.

Worker threads send the requests and wait for the answers. Verdicts go through a queue to the caller's thread, and only
that thread completes cases. Ranks and jobs can share the cache folder, because its files are written atomically. The
files contain the judge's raw answers, which are parsed again by the same rules when they are read.
"""

import os
import queue
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spmdrl.config.judge import JudgeConfig
from spmdrl.data.scores import describe
from spmdrl.health.status import tick
from spmdrl.rewards.base import RewardError, UngradedError
from spmdrl.rewards.judge import Answer, Asker, Case
from spmdrl.rewards.judge_client import Client, TryAgainError, UnknownFormError
from spmdrl.rewards.judge_verdict import FORMATS, BadVerdictError, Question, content_of, tokens_of

FIRST_PAUSE = 1.0
"""Average seconds before the first retry; the pause doubles with each retry, up to LONGEST_PAUSE."""
LONGEST_PAUSE = 60.0
LONGEST_FILE = 1 << 20
"""Maximum number of bytes to read from a cache file."""


class Server(Asker):
    """Asker that sends questions to a chat-completions server. After a RewardError, only `close` may be called."""

    def __init__(self, cfg: JudgeConfig, name: str):
        """Create an asker. Raises ValueError, naming the setting, if the cache or the API key is unusable."""
        super().__init__(cfg, name)
        self._client = Client(cfg.url, os.environ.get(cfg.key_env, ""), cfg.key_env, cfg.timeout)
        self._cache = _Cache(cfg.cache) if cfg.cache else None
        self._failure = ""
        self._work: queue.SimpleQueue[tuple[Case, int, int] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Case, int, int, float | Exception]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._jitter = random.Random()  # a separate generator, so that pauses do not affect other random numbers
        # The lock protects state shared by the threads: counters, the index into FORMATS, and the next request time.
        self._lock = threading.Lock()
        self._form = 0
        self._not_before = 0.0

    def poll(self) -> list[tuple[object, Answer]]:
        """Implement `Asker.poll`."""
        self._take(0.0)
        return super().poll()

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Implement `Asker.drain`. stop: called about once a second."""
        while self._open and not (stop and stop()):
            self._take(1.0)
        return self.poll()

    def close(self) -> None:
        """Abort all requests and stop the threads. Can be called repeatedly."""
        if self._threads:
            self.log_costs()
        self._ended.set()
        self._client.close()
        for _ in self._threads:
            self._work.put(None)
        self._threads = []

    # -- the caller's thread --------------------------------------------------------------------------------------

    def _take(self, patience: float) -> None:
        """Receive verdicts from the threads, waiting up to `patience` seconds for the first one."""
        # Report progress to the watchdog while waiting. This cannot hide a hang, because each request has a timeout.
        tick()
        until = time.monotonic() + patience
        while not self._failure:
            try:
                self._note(*self._found.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                return
            until = 0.0
        raise RewardError(self._failure)

    def _begin(self, case: Case) -> None:
        for i in range(len(case.questions)):
            for vote in range(self.cfg.votes):
                self._work.put((case, i, vote))
                if len(self._threads) < self.cfg.concurrency:
                    # Use daemon threads, because a hanging request must not keep the job from exiting.
                    self._threads.append(threading.Thread(target=self._serve, name="judge", daemon=True))
                    self._threads[-1].start()

    def _note(self, case: Case, question: int, vote: int, found: float | Exception) -> None:
        if case not in self._open:
            return
        if isinstance(found, float):
            case.grades[question, vote] = found
            if grades := self._grades(case):
                self._answer(case, grades)
        elif isinstance(found, UngradedError):
            self._answer(case, str(found))
        else:
            what = str(found) if isinstance(found, RewardError) else f"{type(found).__name__}: {found}"
            self._failure = (
                f"reward function {self.name} failed on {describe(case.response)}: {self._client.without_key(what)}"
            )

    # -- the threads ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._work.get()) is not None and not self._ended.is_set():
            case, question, vote = work
            try:
                found: float | Exception = self._grade(case, case.questions[question], vote)
            except Exception as error:
                found, case.failed = error, True  # `poll` raises the error
            self._found.put((case, question, vote, found))
            if not isinstance(found, float | UngradedError):
                # The job will fail, so more requests would only cost money.
                self._ended.set()

    def _grade(self, case: Case, question: Question, vote: int) -> float:
        """Return a grade from the cache, or else from the server in up to 1 + `retries` attempts.

        Raises UngradedError if no attempt yields a grade, and RewardError if no request can succeed or the budget is
        spent.
        """
        place = question.digest(vote) if self._cache else ""
        if self._cache and (known := self._cache.read(place, question.read)) is not None:
            self._count(cached=1)
            return known
        why = ""
        for attempt in range(1 + self.cfg.retries):
            if case.failed:
                break
            after = None
            try:
                content = self._content(question, attempt)
                grade = question.read(content)
                if self._cache:
                    self._cache.write(place, content)
                return grade
            except BadVerdictError as error:
                self._count(bad_verdicts=1)
                why = str(error)
            except TryAgainError as error:
                why, after = str(error), error.after
            if attempt < self.cfg.retries:
                self._pause(attempt, after)
        raise UngradedError(self._no_verdict(why or "another of its votes failed"))

    def _content(self, question: Question, attempt: int) -> str:
        """Return the judge's answer text, using the first of FORMATS that the server supports."""
        for form in range(self._form, len(FORMATS)):
            self._wait()
            self._spend(repeated=int(attempt > 0 or form > self._form))
            try:
                answer = self._client.ask(question.body(secrets.token_hex(16), form))
            except UnknownFormError as error:
                if form == len(FORMATS) - 1:
                    # The server rejects the text itself, usually because it is too long.
                    raise UngradedError(str(error)) from None
                continue
            with self._lock:
                self._form = max(self._form, form)
            self._count(**tokens_of(answer))
            return content_of(answer)
        raise AssertionError("unreachable: the last format returns or raises")

    def _spend(self, repeated: int) -> None:
        with self._lock:
            if self.cfg.budget and self.spent.calls >= self.cfg.budget:
                raise RewardError(
                    f"the judge's budget is spent (calls: {self.cfg.budget:,}): raise budget (0: no limit), lower "
                    "votes, or set a cache; a restart resumes from the last checkpoint"
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
            # A rate limit applies to all threads, so none of them may send a request before then.
            with self._lock:
                self._not_before = max(self._not_before, time.monotonic() + after)
            seconds = min(seconds, FIRST_PAUSE) + after
        self._ended.wait(seconds)

    def _wait(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._ended.wait(left):
            pass
        if self._ended.is_set():
            raise UngradedError("the judge was closed")


class _Cache:
    """Cache folder for the judge's answers. Thread-safe."""

    def __init__(self, folder: str):
        """Create the folder if it does not exist. Raises ValueError if it cannot be created or written to."""
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ValueError(
                f"the judge's cache {folder} cannot be written to ({error.strerror}); choose another folder"
            ) from None

    def read(self, place: str, parse: Callable[[str], float]) -> float | None:
        """Return the cached grade of a question, or None if there is no readable file with a grade.

        place: hash of the question. parse: function that extracts the grade from an answer or raises BadVerdictError.
        """
        with (
            suppress(OSError, UnicodeDecodeError, BadVerdictError),
            open(self._folder / place[:2] / f"{place}.json", "rb") as file,
        ):
            return parse(file.read(LONGEST_FILE).decode())
        return None

    def write(self, place: str, content: str) -> None:
        """Write an answer to the cache, ignoring errors such as a full disk."""
        file = self._folder / place[:2] / f"{place}.json"
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    out.write(content)
                os.replace(part, file)
            except (OSError, UnicodeEncodeError):
                Path(part).unlink(missing_ok=True)
