"""Input and result types of rewards, and the base class of graders."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.user_code import printable
from spmdrl.data.scores import as_score, describe

NAMED = 10
"""Each rank logs at most this many ungraded responses individually. Later ones are only counted."""
log = logging.getLogger("spmdrl")


@dataclass
class RewardInput:
    """One response to grade. `Pool` requires the fields from the prompt's row to be JSON-serialisable."""

    data_source: str
    solution: str
    """Response text, excluding the prompt. Built-in rewards grade this text. If `--data.prefill` leaves an answer
    marker open, such as `#### `, the text begins at that marker."""
    ground_truth: object
    extra: dict = field(default_factory=dict)
    prompt: str | list = ""
    """The row's prompt, as text or chat messages."""
    prefill: str = ""
    """Start of the reply that is part of the prompt (`--data.prefill`) and precedes `solution`."""
    group: int = 1
    """Number of responses to this prompt that are graded together, if the grader compares responses within a group."""
    given: float | None = None
    """Total reward from the environment in this episode, or None without an environment (`--env`)."""
    given_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the environment's final reward."""
    dialogue: list[tuple[bool, str]] = field(default_factory=list)
    """The conversation with an environment before the policy's last turn (`solution`). Each item is a pair: True if the
    policy wrote the text, and the text, including the chat template's special tokens. The first item is the prompt. The
    list is empty without an environment."""
    tools: list | None = None
    """JSON schemas of the row's tools, as passed to the chat template, or None."""

    @property
    def reply(self) -> str:
        """Return the prefill and the response concatenated, which is what user functions and judges read."""
        return self.prefill + self.solution


@dataclass
class Reward:
    """A score and its named parts, which are used by logs and filters. The score is finite unless `ungraded` is set or
    the grader accepts other scores (`finite` of `load_reward`).
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    """True if grading timed out. The reward then has the score 0 and no parts. Parts that other samples report count as
    0 for this sample. In a combined reward, the other rewards still count."""
    applies: bool = True
    """False if the function does not apply to this row (a TRL-style function returned None); the score is then 0."""
    ungraded: str = ""
    """Why the response could not be graded, such as a sandbox failure, or empty if it was graded. The score of an
    ungraded response is NaN, and the sample is dropped."""
    shut: bool = False
    """True if a gate failed and the score was not negative; the score and all turn rewards are then 0."""


class RewardError(ValueError):
    """Raised for failures that stop the job, such as an exception in a user function or a rejected API key.

    The message states the cause and, if applicable, the setting to change.
    """


class UngradedError(Exception):
    """Raised when a response cannot be graded because of its row, the sandbox or the judge.

    The sample is dropped and counted; a job with too many such samples stops (`--reward.max-ungraded`).
    """


def left_out(name: str, key: object, why: str, count: int) -> Reward:
    """Return the reward for a response that cannot be graded, and log a warning for the first NAMED such responses.

    name: name of the reward. key: key of the response. count: number of ungraded responses on this rank, including this
    one.
    """
    warn_left_out(f"reward function {name} could not grade {describe(key)}, which is left out", why, count)
    return Reward(math.nan, ungraded=why)


def warn_left_out(what: str, why: str, count: int) -> None:
    """Log a warning for each of the first NAMED dropped samples. count: number so far, including this one."""
    if count <= NAMED:
        rest = " (further ones are counted but not named)" if count == NAMED else ""
        log.warning("%s: %s%s", what, printable(why), rest)


class Grader:
    """Base class of graders, which compute the rewards of responses.

    Not thread-safe: use each instance from a single thread. After a RewardError, only `close` may be called.
    """

    wants_groups = False
    """True if all responses to a prompt must be submitted consecutively, in sample order."""
    on_engine = False
    """True if the run's engine performs part of the grading, which happens only in `drain`."""

    def __init__(self, name: str):
        """name: name of the reward in messages."""
        self.name = name
        self.timeouts = 0
        """Number of responses that scored 0 because grading timed out."""
        self.ungraded = 0
        """Number of responses that could not be graded."""
        self.pending = 0
        """Number of submitted responses that have no result yet."""
        self._done: list[tuple[object, Reward]] = []

    def submit(self, key: object, item: RewardInput) -> None:
        """Submit one response for grading without blocking. key: identifies the result. Raises RewardError."""
        raise NotImplementedError

    def poll(self) -> list[tuple[object, Reward]]:
        """Return the results that arrived since the last call, without blocking. Raises RewardError."""
        self._turn(0.0)
        return self._results()

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait until all submitted responses are graded, and return the results that arrived since the last call.

        stop: called repeatedly while waiting; returning True ends the wait early. Raises RewardError.
        """
        while self.pending and not (stop and stop()):
            self._turn(1.0)
        return self._results()

    def close(self) -> None:
        """Stop all processes and requests. Can be called repeatedly."""

    def _turn(self, wait: float) -> None:
        """Receive results; wait up to `wait` seconds for the first result."""

    def _results(self) -> list[tuple[object, Reward]]:
        done, self._done = self._done, []
        return done

    def _answer(self, key: object, reward: Reward) -> None:
        self.pending -= 1
        self._done.append((key, reward))

    def _leave_out(self, key: object, why: str) -> None:
        """Record that a response cannot be graded, and why."""
        self.ungraded += 1
        self._answer(key, left_out(self.name, key, why, self.ungraded))


def as_reward(value: object, finite: bool = True) -> Reward:
    """Check the result of a reward function (a number, `{"score": number, ...}` or a Reward) and return a Reward.

    Other numeric entries of a dict become parts; entries that are not finite numbers (such as verl's `pred` text) are
    dropped. Raises TypeError for values of any other type. Raises ValueError for a part named `score`, and for a
    non-finite score unless `finite` is False.
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
