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
"""Name of the current episode, for async functions of environments. It is unique among open episodes, and stays the
same when the episode is opened again."""


class BrokenError(Exception):
    """A tool raises this if the model is not at fault: the episode is dropped, and the model sees no error."""


class Stateless:
    """An environment without state. It begins with the prompt of its row, and is restored without a replay of turns."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Return None: the episode begins with the prompt of the row."""

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing, since there is no state."""


@dataclass(frozen=True)
class Opening:
    """The values with which an environment is opened for an episode."""

    name: str
    """Name of the environment, as `forms.load` takes it."""
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
    """True if the call timed out. A replay repeats the message about the time-out, not the call."""


@dataclass
class AssistantTurn:
    """A parsed turn of the assistant."""

    content: str
    """The text without the calls and the thought."""
    calls: list[Call] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    """The message that `step` gets for this turn; if empty, `{"role": "assistant", "content": content}`."""
    thought: str = ""


@dataclass
class Reply:
    """An environment's answer to one request of the pool."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages to append, `{"role", "content", "name"?, "tool_call_id"?}`; every content is valid text. In a reply to
    `open`, all messages of the prompt."""
    anew: bool = False
    """True if `messages` replace the complete conversation."""
    reward: float | None = None
    """Sum of the rewards of this turn's calls and step; in a reply to `score`, the final reward. None if there is no
    reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, in a reply to `score`."""
    done: bool = False
    """True if the episode has ended."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools as OpenAI function schemas, in a reply to `open`."""
    state_key: str = ""
    """Digest of the environment's `state_key` after this turn or after the reset; empty if it has no `state_key`."""
    failure: str = ""
    """Reason for a failure of the environment itself, for the log; the episode is dropped. Empty if it did not fail."""
    counts: dict[str, float] = field(default_factory=dict)
    """Counts of a turn: calls, failed_calls (calls that raised), timeouts, cut (texts), malformed (calls that could not
    be made), and the seconds that the turn took. Only the seconds depend on the machine."""
    replayed: list[list[dict[str, Any]]] = field(default_factory=list)
    """The environment's messages after each replayed turn, in a reply to `open`."""
    replayed_anew: list[int] = field(default_factory=list)
    """Indices of the replayed turns whose messages replaced the complete conversation."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool of environments."""

    timeout_s: float = 30.0
    """Seconds that a call may take, unless the environment has its own `timeout_s`."""
    reward_timeout_s: float = 60.0
    """Seconds that `reward()` may take."""
    longest_answer: int = 10_000
    """Most characters of a tool's or a step's text; longer texts are cut."""
    cut: str = "middle"
    """How longer texts are cut: `head` keeps the beginning, `tail` the end, and `middle` keeps both."""
    on_timeout: str = "tell"
    """`tell`: a message reports a call that timed out to the model; `end`: the episode ends as well."""
    memory_mb: int = 0
    """Memory that a worker may use, in MiB; 0 for no limit."""
    python: str = ""
    """Python interpreter of the workers, with PyYAML and the environments' packages; empty: this process's."""

    def __post_init__(self) -> None:
        """Check the values."""
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
    """Return the limits of an environment's settings. python: an interpreter that replaces the configured one."""
    return PoolSettings(
        *(found.timeout, found.reward_timeout, found.longest_answer, found.cut, found.on_timeout),
        *(found.memory_mb, python or found.python),
    )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value, such as a list of messages."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
