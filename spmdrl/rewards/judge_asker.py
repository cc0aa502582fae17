"""How graders ask a judge, wherever it is: cases of questions, and their answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spmdrl.rewards.judge_verdict import Question, Verdict

Answer = tuple[list[float], ...] | str
"""The grades of all votes on each of the questions that were asked together, or why there are none."""


@dataclass(eq=False)
class Case:
    """Questions that are of use only if all of them are answered, under way."""

    key: object
    response: object
    """Key of the response that messages name."""
    questions: tuple[Question, ...]
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    """By (question, vote)."""
    over: bool = False
    """It was answered."""
    failed: bool = False
    """A vote failed, so the others are of no use."""

    def answer(self, votes: int) -> tuple[list[float], ...]:
        """Return the grades of all votes on each question, all of which are there."""
        return tuple([self.verdicts[i, vote].grade for vote in range(votes)] for i in range(len(self.questions)))


@dataclass
class Counters:
    """Costs of a judge so far."""

    calls: int = 0
    """Requests sent, repeated ones too."""
    repeated: int = 0
    """Those of them that were sent because one before failed."""
    bad_verdicts: int = 0
    """Answers in a form that is no verdict."""
    cached: int = 0
    """Verdicts from the cache."""
    prompt_tokens: int = 0
    """Tokens that the server says to have read and written."""
    completion_tokens: int = 0


class Asker(Protocol):
    """Asks a judge. A case is a few questions that are of use only together."""

    spent: Counters

    @property
    def on_engine(self) -> bool:
        """True: it asks the run's engine, in `drain` alone."""
        ...

    @property
    def pending(self) -> int:
        """Cases submitted and not yet answered."""
        ...

    def submit(self, key: object, *questions: Question, response: object = None) -> None:
        """Take a case, without waiting.

        key: comes back with the answer. response: key by which messages name it, if that is another.
        """
        ...

    def poll(self) -> list[tuple[object, Answer]]:
        """Answers since the last call, without waiting. Raises RewardError."""
        ...

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Wait for all that was submitted, or until `stop()`; answers since the last call. Raises RewardError."""
        ...

    def close(self) -> None:
        """End all requests. May be called twice."""
        ...
