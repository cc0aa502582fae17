"""Plays an environment in a child process, one episode at a time, for tests and the terminal. Every call blocks."""

from types import TracebackType
from typing import Any

from spmdrl.env.base import AssistantTurn, Call, Opening, PoolSettings, Reply
from spmdrl.env.pool import Pool


class PlayError(RuntimeError):
    """The environment failed; the message gives the reason."""


class Play:
    """An environment in a child process, used as `with Play("my_env.py:MyEnv") as play:`.

    Its methods raise PlayError if the environment fails.
    """

    def __init__(self, name: str, settings: dict[str, Any] | None = None, limits: PoolSettings | None = None):
        """Load the environment. Raises ValueError if it cannot be loaded.

        name: a value of `--env`. settings: keyword arguments of the environment's class.
        """
        self.name, self.settings = name, settings or {}
        self.pool = Pool(1, limits)
        self.opened = False
        try:
            self.hello = self.pool.check(name, self.settings)
        except BaseException:
            self.pool.shutdown()
            raise

    def open(self, row: dict[str, Any] | None = None, seed: int = 0) -> Reply:
        """End the current episode, and start another. Return a reply with the first messages and the tools."""
        self._close()
        self.pool.open(0, Opening(self.name, row or {}, seed, self.settings))
        self.opened = True
        return self._answer()

    def say(self, content: str = "", *calls: Call) -> Reply:
        """Send an assistant turn that consists of text, calls, or both. Return the environment's reply."""
        return self.turn(AssistantTurn(content, list(calls)))

    def call(self, name: str, **arguments: Any) -> Reply:
        """Call one tool and return the environment's reply."""
        return self.say("", Call(name, arguments, "call00000"))

    def turn(self, turn: AssistantTurn) -> Reply:
        """Send a parsed assistant turn and return the environment's reply."""
        self.pool.say(0, turn)
        return self._answer()

    def score(self) -> Reply:
        """Return the reply with the final reward."""
        self.pool.score(0)
        return self._answer()

    def _answer(self) -> Reply:
        while True:
            for _, reply in self.pool.poll(1.0):
                if reply.failure:
                    raise PlayError(reply.failure)
                return reply

    def _close(self) -> None:
        if self.opened:
            self.pool.close(0)
            self.opened = False

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        self.pool.shutdown()
