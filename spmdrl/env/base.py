"""Types that a pool's callers and its workers share."""

import hashlib
import json
import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdrl.config.environment import EnvironmentConfig

EPISODE: ContextVar[str] = ContextVar("episode", default="")
"""Name of the current episode, which async functions of environments can read. It is unique among the open episodes,
and stays the same when an episode is opened again."""


class BrokenError(Exception):
    """A tool raises this for an error that the model did not cause. The model sees no error; the episode is dropped."""


class Stateless:
    """Base of environments without state. An episode begins with its row's prompt, and needs no replay of its turns."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Return None, which means that the episode begins with the prompt of the row."""

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing, since there is no state."""


@dataclass(frozen=True)
class Opening:
    """The values with which an environment is opened for an episode."""

    name: str
    """Name of the environment, in a form that `forms.load` accepts."""
    row: dict[str, Any]
    """Columns of the dataset's row as JSON values; `prompt` is a text or a list of messages."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's class."""


@dataclass
class Call:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any] | None
    """JSON values by name; None if the call is malformed."""
    id: str = ""
    error: str = ""
    """Error of a malformed call, a sentence for the model; empty for a valid call."""
    inline: bool = False
    """True if the call is a block of code, which stays in the content of the message."""
    late: bool = False
    """True if the call timed out. A replay of the turn repeats the message about the time-out without calling again."""


@dataclass
class AssistantTurn:
    """A parsed turn of the assistant."""

    content: str
    """Text of the turn without its tool calls and its thought (reasoning)."""
    calls: list[Call] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    """The message that `step` gets for this turn. If it is empty, `step` gets the role `assistant` and the content."""
    thought: str = ""


@dataclass
class Reply:
    """An environment's answer to one request of the pool."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages to append to the conversation, `{"role", "content", "name"?, "tool_call_id"?}`; every content is valid
    text. In a reply to `open`, these are all messages of the prompt."""
    anew: bool = False
    """True if `messages` replace the complete conversation."""
    reward: float | None = None
    """Sum of the rewards that this turn's tool calls and `step` returned; in a reply to `score`, the final reward. None
    if there is no reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, in a reply to `score`."""
    done: bool = False
    """True if the episode has ended."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools as OpenAI function schemas, in a reply to `open`."""
    state_key: str = ""
    """Digest of `state_key()` after this turn or after the reset; empty if the environment has no `state_key`."""
    failure: str = ""
    """Reason for a failure of the environment itself, for the log; the episode is dropped. Empty if it did not fail."""
    counts: dict[str, float] = field(default_factory=dict)
    """Counts of a turn: calls, failed_calls (calls that raised an exception), timeouts, cut (texts that were cut),
    malformed (calls that could not be made), and seconds (the time of the turn)."""
    replayed: list[list[dict[str, Any]]] = field(default_factory=list)
    """The environment's messages after each replayed turn, in a reply to `open`."""
    replayed_anew: list[int] = field(default_factory=list)
    """Indices of the replayed turns whose messages replaced the complete conversation."""


@dataclass(frozen=True)
class PoolSettings:
    """Limits of the environments of a pool, for time, text and memory, and the interpreter of their processes."""

    timeout_s: float = 30.0
    """Time limit of a call in seconds, unless the environment defines another `timeout_s`."""
    reward_timeout_s: float = 60.0
    """Time limit of `reward()` in seconds."""
    longest_answer: int = 10_000
    """Maximum number of characters in a text that a tool or `step` returns; longer texts are cut."""
    cut: str = "middle"
    """The part of a longer text that is kept: `head` is the beginning, `tail` the end, and `middle` keeps both ends."""
    on_timeout: str = "tell"
    """Effect of a call that times out. `tell`: a message reports it to the model; `end`: the episode also ends."""
    memory_mb: int = 0
    """Maximum memory of a worker process in MiB; 0 for no limit."""
    python: str = ""
    """Python interpreter of the worker processes, which needs PyYAML and the environments' packages. If it is empty,
    the interpreter of this process is used."""

    def __post_init__(self) -> None:
        """Raise ValueError if a setting has an invalid value."""
        for name in ("timeout_s", "reward_timeout_s"):
            if not (0 < getattr(self, name) < math.inf):
                raise ValueError(f"{name} is {getattr(self, name)}: give a number of seconds above 0")
        if self.longest_answer < 1 or self.memory_mb < 0:
            raise ValueError("longest_answer must be 1 or more, and memory_mb 0 or more")
        if self.cut not in ("head", "tail", "middle"):
            raise ValueError(f"cut must be head, tail or middle, not {self.cut!r}")
        if self.on_timeout not in ("tell", "end"):
            raise ValueError(f"on_timeout must be tell or end, not {self.on_timeout!r}")


def limits_of(found: "EnvironmentConfig", python: str = "") -> PoolSettings:
    """Return a pool's settings for a configured environment. python: if given, replaces the configured interpreter."""
    return PoolSettings(
        *(found.timeout, found.reward_timeout, found.longest_answer, found.cut, found.on_timeout),
        *(found.memory_mb, python or found.python),
    )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value, such as a list of messages."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
