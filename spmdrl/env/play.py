"""One episode at a time of an environment in a process of its own, for tests and the terminal: every call waits."""

from types import TracebackType
from typing import Any

from spmdrl.env.base import AssistantTurn, Call, Opening, PoolSettings, Reply
from spmdrl.env.pool import Pool


class PlayError(RuntimeError):
    """A failure of the environment, with its reason."""


class Play:
    """An environment, opened by `with Play("my_env.py:MyEnv") as play:`. Calls raise PlayError if it fails."""

    def __init__(self, name: str, settings: dict[str, Any] | None = None, limits: PoolSettings | None = None):
        """name: of the environment, as `--env`. settings: keyword arguments of its class. Raises ValueError."""
        self.name, self.settings = name, settings or {}
        self.pool = Pool(1, limits)
        self.opened = False
        try:
            self.hello = self.pool.check(name, self.settings)
        except BaseException:
            self.pool.shutdown()
            raise

    def open(self, row: dict[str, Any] | None = None, seed: int = 0) -> Reply:
        """Begin an episode, and end the one before. The reply has the first messages and the tools."""
        self._close()
        self.pool.open(0, Opening(self.name, row or {}, seed, self.settings))
        self.opened = True
        return self._answer()

    def say(self, content: str = "", *calls: Call) -> Reply:
        """Send an assistant's turn: text, calls, or both."""
        return self.turn(AssistantTurn(content, list(calls)))

    def call(self, name: str, **arguments: Any) -> Reply:
        """Call one tool."""
        return self.say("", Call(name, arguments, "call00000"))

    def turn(self, turn: AssistantTurn) -> Reply:
        """Send a parsed turn."""
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
