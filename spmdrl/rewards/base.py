"""Types that every reward takes and returns, and what all graders share."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.user_code import printable
from spmdrl.data.scores import as_score, describe

NAMED = 10
"""Ungraded responses that the log of each rank names."""
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
    """The start of the reply before `solution`, which the prompt gave (`--data.prefill`)."""
    group: int = 1
    """Responses to this prompt that are graded together, if the grader wants whole groups."""
    given: float | None = None
    """The rewards that an environment gave the episode, added up; None without an environment (`--env`)."""
    given_parts: dict[str, float] = field(default_factory=dict)
    """Parts of its final reward."""
    dialogue: list[tuple[bool, str]] = field(default_factory=list)
    """The conversation with an environment before this response, the last of the policy's turns: for each piece whether
    the policy wrote it, and its text with the marks of the chat template. The first piece is the prompt. Empty without
    an environment."""
    tools: list | None = None
    """JSON schemas of the tools of the prompt's row, if it has any, as the chat template showed them."""

    @property
    def reply(self) -> str:
        """The prefill and the response, as functions in files and judges read them."""
        return self.prefill + self.solution


@dataclass
class Reward:
    """A finite score and its named parts (for logs and filters)."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    """The grading was stopped: the score is 0, and so is every part that other samples have."""
    applies: bool = True
    """False: the function does not apply to this row (TRL's None), and the score is 0."""
    ungraded: str = ""
    """Why the response could not be graded, for a reason outside of it: the score is nan, and the sample is left out.
    Empty: it was graded."""
    shut: bool = False
    """A gate failed: the score and all rewards of turns are 0."""


class RewardError(ValueError):
    """A grading gave no usable score. The message names the function, the prompt and what to change."""


class UngradedError(Exception):
    """A response cannot be graded because of its row, the sandbox or the judge.

    The sample is left out and counted; a job with many such samples stops (`--reward.max-ungraded`).
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


class Grader:
    """Grades responses in any order. Use it from one thread; after a RewardError only `close` may be called."""

    wants_groups = False
    """True: the responses of a group are submitted one after another, in the order of samples, when all are there."""
    on_engine = False
    """True: the run's engine does a part of the grading, in `drain` alone."""

    def __init__(self, name: str):
        """name: of the reward, in messages."""
        self.name = name
        self.timeouts = 0
        """Gradings that ran out of time and were scored 0."""
        self.ungraded = 0
        """Gradings without a score."""
        self.pending = 0
        """Responses submitted and not yet answered."""
        self._done: list[tuple[object, Reward]] = []

    def submit(self, key: object, item: RewardInput) -> None:
        """Take one response to grade, without waiting. key: comes back with its result. Raises RewardError."""
        raise NotImplementedError

    def poll(self) -> list[tuple[object, Reward]]:
        """Return results since the last call, without waiting. Raises RewardError."""
        self._turn(0.0)
        return self._results()

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for all that was submitted, or until `stop()`, which is called once a second; return results since the
        last call. Raises RewardError.
        """
        while self.pending and not (stop and stop()):
            self._turn(1.0)
        return self._results()

    def close(self) -> None:
        """End all processes and requests. May be called twice."""

    def _turn(self, wait: float) -> None:
        """Take results, waiting up to so many seconds for the first."""

    def _results(self) -> list[tuple[object, Reward]]:
        done, self._done = self._done, []
        return done

    def _answer(self, key: object, reward: Reward) -> None:
        self.pending -= 1
        self._done.append((key, reward))

    def _leave_out(self, key: object, why: str) -> None:
        """Answer that a response cannot be graded."""
        self.ungraded += 1
        self._answer(key, left_out(self.name, key, why, self.ungraded))


def as_reward(value: object, finite: bool = True) -> Reward:
    """Check and convert the result of a reward function: a number, `{"score": number, ...}` or a Reward.

    Other numeric entries of a dict become parts; entries that are not finite numbers (verl's `pred` texts) are left
    out. Raises TypeError for another type, ValueError for a part named `score`, and for a score that is not finite
    unless `finite` is False.
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
