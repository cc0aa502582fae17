"""Types that every reward takes and returns, and the interface of a grader."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spmdrl.config.user_code import printable
from spmdrl.data.keys import describe
from spmdrl.data.scores import as_score

NAMED = 10
"""Responses that could not be graded, of each rank, that the log names."""
log = logging.getLogger("spmdrl")


@dataclass
class RewardInput:
    """One response to grade. All but `solution` come from the prompt's row and are JSON-able."""

    data_source: str
    solution: str
    """The response's text, without the prompt, which built-in rewards grade. It begins with the mark of an answer that
    `--data.prefill` leaves open."""
    ground_truth: object
    extra: dict = field(default_factory=dict)
    prompt: str | list = ""
    """The prompt as its row has it: text, or chat messages."""
    prefill: str = ""
    """The start of the reply in front of `solution`, which the prompt gave (`--data.prefill`)."""
    group: int = 1
    """Responses to this prompt that are graded together, where the grader wants whole groups."""
    given: float | None = None
    """The rewards that an environment gave the episode, added up; None without an environment (`--env`)."""
    given_parts: dict[str, float] = field(default_factory=dict)
    """Parts of its final reward."""
    dialogue: list[tuple[bool, str]] = field(default_factory=list)
    """With an environment: all that stood before this response, the last of the policy's turns, in order: whether the
    policy wrote a piece, and its text with the marks of the chat template. The first piece is the prompt. Empty without
    an environment."""
    tools: list | None = None
    """JSON schemas of the tools that the chat template showed with the prompt, if its row gives any."""

    @property
    def reply(self) -> str:
        """The whole reply, as functions in files and judges read it: the prefill and the response."""
        return self.prefill + self.solution


@dataclass
class Reward:
    """A finite score and its named parts (for logs and filters)."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    """The grading was stopped: the score is 0, and so is every part that other samples have."""
    applies: bool = True
    """False: the function says nothing of this row (TRL's None), and the score is 0."""
    ungraded: str = ""
    """Why the response could not be graded, through no fault of its own: the score is nan, and the sample is left out.
    Empty: it was graded."""
    shut: bool = False
    """A gate failed: the score and all rewards of turns are 0."""


class RewardError(ValueError):
    """A grading that gave no usable score. The message names the function, the prompt and what to change."""


class UngradedError(Exception):
    """A response cannot be graded, and that says nothing about it: its row, the sandbox or the judge is at fault.

    The sample is left out and counted; a job in which there are many stops (`--reward.max-ungraded`).
    """


def left_out(name: str, key: object, why: str, count: int) -> Reward:
    """Return the reward of a response that cannot be graded, and name it in the log if it is among the first.

    name: of the reward. key: of the response. count: such responses so far on this rank, this one included.
    """
    warn_left_out(f"reward function {name} could not grade {describe(key)}, which is left out", why, count)
    return Reward(math.nan, ungraded=why)


def warn_left_out(what: str, why: str, count: int) -> None:
    """Warn of a sample that is left out, if it is among the first. count: such samples so far, this one included."""
    if count <= NAMED:
        rest = " (more of them are counted, not named)" if count == NAMED else ""
        log.warning("%s: %s%s", what, printable(why), rest)


class Grader(Protocol):
    """Grades in any order; `key` is the caller's and comes back with the result."""

    name: str

    @property
    def wants_groups(self) -> bool:
        """True: the responses of a group are submitted one after another, in the order of their samples, when all are
        there.
        """
        ...

    @property
    def on_engine(self) -> bool:
        """True: the run's engine does a part of the grading, in `drain` alone."""
        ...

    @property
    def timeouts(self) -> int:
        """Gradings that ran out of time and were scored 0."""
        ...

    @property
    def ungraded(self) -> int:
        """Gradings without a score."""
        ...

    @property
    def pending(self) -> int:
        """Gradings submitted and not yet answered."""
        ...

    def submit(self, key: object, item: RewardInput) -> None:
        """Take one response to grade. Never blocks on the grading."""
        ...

    def poll(self) -> list[tuple[object, Reward]]:
        """Results since the last call, without waiting. Raises RewardError."""
        ...

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for all that was submitted, or until `stop()`; results since the last call. Raises RewardError."""
        ...

    def close(self) -> None:
        """End every process. May be called twice."""
        ...


def as_reward(value: object, finite: bool = True) -> Reward:
    """Check and convert the result of a reward function: a number, `{"score": number, ...}` or a Reward.

    Other numeric entries of a dict become parts; entries that are not finite numbers (verl's `pred` texts) are left
    out. Raises TypeError for another type, ValueError for a part named `score` beside the score, and for a score that
    is not finite, where `finite` asks for one.
    """
    applies = True
    if isinstance(value, Reward):
        if "score" in value.parts:
            raise ValueError("it returned a part named 'score', which stands for the score itself: rename the part")
        applies, value = value.applies, {"score": value.score} | value.parts
    score, parts = as_score(value)
    if finite and not math.isfinite(score):
        raise ValueError(f"it returned the score {score}, which is not finite")
    return Reward(score, parts, applies=applies)
