"""Records the steps of an engine: the number of running sequences and the seconds of each."""

import time
from typing import Any


class EngineSteps:
    """Wrapper of an engine's `submit`, `poll` and `abort`, which counts requests and times steps."""

    def __init__(self, engine: Any):
        self.polls: list[tuple[int, float]] = []
        """For every step of the engine: number of unfinished sequences, and seconds."""
        self.running = self.tokens = 0
        """Numbers of unfinished requests, and of tokens of ended ones."""
        self._submit, self._poll, self._abort = engine.submit, engine.poll, engine.abort
        engine.submit, engine.poll, engine.abort = self.submit, self.poll, self.abort

    def submit(self, request: Any) -> None:
        """Submit a request and count it."""
        self.running += 1
        self._submit(request)

    def poll(self) -> list:
        """Poll the engine and record its step."""
        began, running = time.perf_counter(), self.running
        done = self._poll()
        self.polls.append((running, time.perf_counter() - began))
        return self._count(done)

    def abort(self, keys: Any) -> list:
        """Abort requests and count their tokens."""
        return self._count(self._abort(keys))

    def taken(self) -> list[tuple[int, float]]:
        """Return the steps since the last call, and begin anew, also with the number of tokens."""
        polls, self.polls, self.tokens = self.polls, [], 0
        return polls

    def _count(self, done: list) -> list:
        self.tokens += sum(len(completion.tokens) for completion in done)
        self.running -= len(done)
        return done
