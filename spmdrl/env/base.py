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
"""Name of the episode whose environment runs, in its async functions: unique among open episodes, and the same when the
episode is opened again."""


class BrokenError(Exception):
    """Raised by a tool that is itself at fault: the episode is left out, and the model sees no error."""


class Stateless:
    """An environment that keeps nothing: it begins with the prompt of its row, and needs no turns to be restored."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin with the prompt of the row."""

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an empty state."""


@dataclass(frozen=True)
class Opening:
    """An environment to open."""

    name: str
    """Name of the environment, which `forms.load` reads."""
    row: dict[str, Any]
    """Columns of the dataset's row, as JSON has them; `prompt` is a text or messages."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""


@dataclass
class Call:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any] | None
    """JSON values by name; None if the call is malformed."""
    id: str = ""
    error: str = ""
    """Error of a malformed call, as a sentence for the model."""
    inline: bool = False
    """True for a block of code, which stays in the content of the message."""
    late: bool = False
    """The call timed out. A replay repeats the message of the time-out, not the call."""


@dataclass
class AssistantTurn:
    """A turn of the assistant, as parsed."""

    content: str
    """The text without calls."""
    calls: list[Call] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    """The turn as a message, which `step` gets; empty: `{"role": "assistant", "content": content}`."""
    thought: str = ""


@dataclass
class Reply:
    """An environment's answer to one request of the pool."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages to append: `{"role", "content", "name"?, "tool_call_id"?}`; every content is valid text. From `open`:
    the whole prompt."""
    anew: bool = False
    """True: the messages replace the whole conversation."""
    reward: float | None = None
    """Sum of the rewards of this turn's calls and step, or the final one from `score`. None: there was none."""
    parts: dict[str, float] = field(default_factory=dict)
    """From `score`: parts of the reward by name."""
    done: bool = False
    """True: the episode has ended."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """From `open`: OpenAI function schemas."""
    state_key: str = ""
    """Digest of the environment's `state_key` after this turn, or after its reset; empty if it has none."""
    failure: str = ""
    """Reason for which the environment itself failed, for the log: the episode is left out."""
    counts: dict[str, float] = field(default_factory=dict)
    """Of a turn: calls, failed_calls (they raised), timeouts, cut (texts), malformed (calls that could not be made),
    and the seconds that the turn took, which alone depend on the machine."""
    replayed: list[list[dict[str, Any]]] = field(default_factory=list)
    """From `open` with turns to replay: the messages that followed each of them."""
    replayed_anew: list[int] = field(default_factory=list)
    """Indices of the turns whose messages replaced the whole conversation."""


@dataclass(frozen=True)
class PoolSettings:
    """Limits of a pool."""

    timeout_s: float = 30.0
    """Seconds that a call may take, of environments without a `timeout_s` of their own."""
    reward_timeout_s: float = 60.0
    """Seconds that `reward()` may take."""
    longest_answer: int = 10_000
    """Characters of a tool's or a step's text that are kept."""
    cut: str = "middle"
    """The part of a longer text that is kept: `head`, `tail`, or all but the `middle`."""
    on_timeout: str = "tell"
    """After a call that timed out the model gets a message (`tell`), or the episode ends as well (`end`)."""
    memory_mb: int = 0
    """Memory that a worker may have, in MiB; 0: no bound."""
    python: str = ""
    """Interpreter of the workers, which has what the environments need, and PyYAML; empty: this process's."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name in ("timeout_s", "reward_timeout_s"):
            if not (0 < getattr(self, name) < math.inf):
                raise ValueError(f"{name} is {getattr(self, name)}: give seconds above 0")
        if self.longest_answer < 1 or self.memory_mb < 0:
            raise ValueError("longest_answer must be 1 or more, and memory_mb 0 or more")
        if self.cut not in ("head", "tail", "middle"):
            raise ValueError(f"cut is {self.cut!r}: take head, tail or middle")
        if self.on_timeout not in ("tell", "end"):
            raise ValueError(f"on_timeout is {self.on_timeout!r}: take tell or end")


def limits_of(found: "EnvironmentConfig", python: str = "") -> PoolSettings:
    """Return the limits of an environment's settings. python: an interpreter in place of theirs."""
    return PoolSettings(
        *(found.timeout, found.reward_timeout, found.longest_answer, found.cut, found.on_timeout),
        *(found.memory_mb, python or found.python),
    )


def digest(value: Any) -> str:
    """Return a short text that is equal for equal JSON values only, as messages are."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
