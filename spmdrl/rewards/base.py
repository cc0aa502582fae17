"""Input and result types of rewards, and the base class of graders."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.user_code import printable
from spmdrl.data.scores import as_score, describe

NAMED = 10
"""Maximum number of ungraded responses that each rank names in its log; further ones are only counted."""
log = logging.getLogger("spmdrl")


@dataclass
class RewardInput:
    """One response to grade. `Pool` requires that the fields from the prompt's row can be written as JSON."""

    data_source: str
    solution: str
    """Text of the response without the prompt; built-in rewards grade it. If `--data.prefill` opens an
    answer, as `#### ` does, the text begins with the part of the prefill from this mark to its end."""
    ground_truth: object
    extra: dict = field(default_factory=dict)
    prompt: str | list = ""
    """The prompt as given in its row: text, or chat messages."""
    prefill: str = ""
    """Start of the reply, before `solution`, that the prompt contains (`--data.prefill`)."""
    group: int = 1
    """Number of responses to this prompt that are graded together, if the grader compares responses of a group."""
    given: float | None = None
    """Sum of the rewards that the environment gave in the episode; None without an environment (`--env`)."""
    given_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the environment's final reward."""
    dialogue: list[tuple[bool, str]] = field(default_factory=list)
    """The conversation with an environment before the policy's last turn, which is `solution`. Each item is a pair:
    whether the policy wrote it, and its text with the special tokens of the chat template. The first item is the
    prompt. Empty without an environment."""
    tools: list | None = None
    """JSON schemas of the tools of the prompt's row, as passed to the chat template, or None."""

    @property
    def reply(self) -> str:
        """Return the prefill and the response joined, the text that user functions and judges read."""
        return self.prefill + self.solution


@dataclass
class Reward:
    """A score and its named parts, which logs and filters use. The score is finite unless `ungraded` is set or the
    grader accepts other scores (`finite` of `load_reward`).
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    """True if a grading took too long and was stopped. It gives the score 0 and no parts, and each part that other
    samples have counts as 0 for this sample. In a combined reward, the other rewards still count."""
    applies: bool = True
    """False if the function does not apply to this row (a function in TRL's form returned None); the score is 0."""
    ungraded: str = ""
    """The reason why the response could not be graded, such as a failed sandbox. The score is NaN, and the sample is
    left out. Empty if the response was graded."""
    shut: bool = False
    """True if a gate failed and the score was not negative, so that the score and the rewards of all turns are 0."""


class RewardError(ValueError):
    """A reward failed in a way that stops the job, such as an exception in a user's function or a rejected API key.

    The message names the cause and, if there is one, the setting to change.
    """


class UngradedError(Exception):
    """A response cannot be graded because of its row, the sandbox or the judge.

    The sample is left out and counted; a job with many such samples stops (`--reward.max-ungraded`).
    """


def left_out(name: str, key: object, why: str, count: int) -> Reward:
    """Return the reward of a response that cannot be graded, and log a warning if it is among the first NAMED ones.

    name: name of the reward. key: key of the response. count: ungraded responses of this rank so far, with this one.
    """
    warn_left_out(f"reward function {name} could not grade {describe(key)}, which is left out", why, count)
    return Reward(math.nan, ungraded=why)


def warn_left_out(what: str, why: str, count: int) -> None:
    """Log a warning for each of the first NAMED samples that are left out. count: number so far, including this one."""
    if count <= NAMED:
        rest = " (further ones are counted but not named)" if count == NAMED else ""
        log.warning("%s: %s%s", what, printable(why), rest)


class Grader:
    """Base class of graders, which compute the rewards of responses.

    Use a grader from one thread only. After a RewardError only `close` may be called.
    """

    wants_groups = False
    """True if all responses to a prompt must be submitted one after another, in the order of their samples."""
    on_engine = False
    """True if the run's engine does a part of the grading. It does so only in `drain`."""

    def __init__(self, name: str):
        """Create a grader. name: name of the reward in messages."""
        self.name = name
        self.timeouts = 0
        """Number of gradings that ran out of time and scored 0."""
        self.ungraded = 0
        """Number of responses that could not be graded."""
        self.pending = 0
        """Number of submitted responses without a result so far."""
        self._done: list[tuple[object, Reward]] = []

    def submit(self, key: object, item: RewardInput) -> None:
        """Submit one response for grading without waiting. key: identifies its result. Raises RewardError."""
        raise NotImplementedError

    def poll(self) -> list[tuple[object, Reward]]:
        """Return the results that arrived since the last call, without waiting. Raises RewardError."""
        self._turn(0.0)
        return self._results()

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for the results of all submitted responses; return the results that arrived since the last call.

        stop: called repeatedly during the wait, which ends early if it returns True. Raises RewardError.
        """
        while self.pending and not (stop and stop()):
            self._turn(1.0)
        return self._results()

    def close(self) -> None:
        """End all processes and requests. May be called twice."""

    def _turn(self, wait: float) -> None:
        """Receive results; wait up to `wait` seconds for the first result."""

    def _results(self) -> list[tuple[object, Reward]]:
        done, self._done = self._done, []
        return done

    def _answer(self, key: object, reward: Reward) -> None:
        self.pending -= 1
        self._done.append((key, reward))

    def _leave_out(self, key: object, why: str) -> None:
        """Record that a response cannot be graded, with the reason."""
        self.ungraded += 1
        self._answer(key, left_out(self.name, key, why, self.ungraded))


def as_reward(value: object, finite: bool = True) -> Reward:
    """Check the result of a reward function (a number, `{"score": number, ...}` or a Reward) and return a Reward.

    Other numeric entries of a dict become parts; entries that are not finite numbers (verl's `pred` texts) are left
    out. Raises TypeError for a value of another type. Raises ValueError for a part named `score`, and for a score that
    is not finite unless `finite` is False.
    """
    applies = True
    if isinstance(value, Reward):
        if "score" in value.parts:
            raise ValueError("it returned a part named 'score', a name reserved for the score itself: rename the part")
        applies, value = value.applies, {"score": value.score} | value.parts
    score, parts = as_score(value)
    if finite and not math.isfinite(score):
        raise ValueError(f"it returned the score {score}, which is not finite")
    return Reward(score, parts, applies=applies)
