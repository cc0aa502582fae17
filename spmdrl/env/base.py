"""Types shared by a pool's callers and its workers."""

import hashlib
import json
import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdrl.config.environment import EnvironmentConfig

EPISODE: ContextVar[str] = ContextVar("episode", default="")
"""Name of the current episode, readable from an environment's async functions. It is unique among open episodes, and
does not change when an episode is reopened."""


class BrokenError(Exception):
    """Raised by a tool for an error that the model did not cause. The model is not told, and the episode is dropped."""


class Stateless:
    """Base class for stateless environments. An episode starts with its row's prompt and needs no replay."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Return None, which means that the episode starts with the row's prompt."""

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing, since there is no state."""


@dataclass(frozen=True)
class Opening:
    """Arguments for opening an environment for an episode."""

    name: str
    """Name of the environment, in a form that `forms.load` accepts."""
    row: dict[str, Any]
    """The dataset row's columns as JSON values; `prompt` is a string or a list of messages."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's class."""


@dataclass
class Call:
    """A tool call, as written by the model."""

    name: str
    arguments: dict[str, Any] | None
    """JSON values by argument name, or None if the call is malformed."""
    id: str = ""
    error: str = ""
    """Error message for the model if the call is malformed, or an empty string if the call is valid."""
    inline: bool = False
    """True if the call is a code block, which stays in the message content."""
    late: bool = False
    """True if the call timed out. A replay of the turn repeats the time-out message instead of the call."""


@dataclass
class AssistantTurn:
    """A parsed assistant turn."""

    content: str
    """The turn's text, without tool calls and thought (reasoning)."""
    calls: list[Call] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    """The message passed to `step` for this turn. If empty, `step` gets only the role `assistant` and the content."""
    thought: str = ""


@dataclass
class Reply:
    """An environment's answer to one request of the pool."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages to append to the conversation, in the form `{"role", "content", "name"?, "tool_call_id"?}`. Each content
    is valid text or, if it shows images, a list of parts `{"type": "text", "text": ...}` and `{"type": "image",
    "image": "data:..."}`. A reply to `open` contains all prompt messages."""
    anew: bool = False
    """True if `messages` replace the whole conversation."""
    reward: float | None = None
    """Sum of the rewards returned by this turn's tool calls and `step`, or the final reward in a reply to `score`. The
    value is None if there is no reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, in a reply to `score`."""
    done: bool = False
    """True if the episode has ended."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools as OpenAI function schemas, in a reply to `open`."""
    state_key: str = ""
    """Digest of `state_key()` after this turn or the reset, or "" if the environment does not define `state_key`."""
    failure: str = ""
    """Error message for the log if the environment itself failed, or "" otherwise. A failure drops the episode."""
    counts: dict[str, float] = field(default_factory=dict)
    """Per-turn counts: calls, failed_calls (calls that raised an exception), timeouts, cut (truncated texts), malformed
    (calls that could not be made), and seconds (the turn's duration)."""
    replayed: list[list[dict[str, Any]]] = field(default_factory=list)
    """The environment's messages after each replayed turn, in a reply to `open`."""
    replayed_anew: list[int] = field(default_factory=list)
    """Indices of the replayed turns whose messages replaced the whole conversation."""


@dataclass(frozen=True)
class PoolSettings:
    """Time, text and memory limits for a pool's environments, and the Python interpreter of its processes."""

    timeout_s: float = 30.0
    """Time limit per call in seconds, unless the environment defines its own `timeout_s`."""
    reward_timeout_s: float = 60.0
    """Time limit of `reward()` in seconds."""
    longest_answer: int = 10_000
    """Maximum number of characters in a text returned by a tool or `step`; longer texts are truncated."""
    cut: str = "middle"
    """Truncation of longer texts: `head` keeps the beginning, `tail` keeps the end, and `middle` keeps both ends."""
    on_timeout: str = "tell"
    """Response to a call that times out: `tell` reports it to the model in a message; `end` also ends the episode."""
    memory_mb: int = 0
    """Maximum memory of a worker process in MiB, or 0 for no limit."""
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
    """Return the pool settings for a configured environment. python: if set, overrides the configured interpreter."""
    return PoolSettings(
        *(found.timeout, found.reward_timeout, found.longest_answer, found.cut, found.on_timeout),
        *(found.memory_mb, python or found.python),
    )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value, such as a list of messages."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
