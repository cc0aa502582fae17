"""The answer of an environment to one turn, while it is made."""

import asyncio
from dataclasses import dataclass, field
from typing import Any


class AnewError(Exception):
    """Calls of a turn still run after their time limits and may change the environment: it must be opened anew."""

    def __init__(self, late: list[int], calls: list[asyncio.Future]):
        """late: indices of the calls that timed out. calls: those of them that still run."""
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
    """Indices of the calls that timed out."""
    going_on: list[asyncio.Future] = field(default_factory=list)
    """Those of them that still run."""
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("calls", "failed_calls", "timeouts", "cut", "malformed", "seconds"), 0)
    )
