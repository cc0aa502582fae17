"""The answer of an environment to one turn, while it is made."""

import asyncio
from dataclasses import dataclass, field
from typing import Any


class AnewError(Exception):
    """Calls of a turn go on beyond their limits, and may change the environment: it has to be opened anew."""

    def __init__(self, late: list[int], calls: list[asyncio.Future]):
        """late: indices of all calls of the turn that did not answer. calls: those that go on."""
        super().__init__(late)
        self.late, self.calls = late, calls


@dataclass
class Turn:
    """The answer to one turn of the assistant, while it is made."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    anew: bool = False
    """The messages take the place of the whole conversation."""
    done: bool = False
    late: list[int] = field(default_factory=list)
    """Indices of the calls that did not answer."""
    going_on: list[asyncio.Future] = field(default_factory=list)
    """The calls among them that did not end either."""
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("calls", "failed_calls", "timeouts", "cut", "malformed", "seconds"), 0)
    )
