"""Open environments on the caller's side, with all that opens them again in another process, and these processes."""

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdrl.data.scores import describe
from spmdrl.env.base import AssistantTurn, Opening, PoolSettings, digest
from spmdrl.workers.processes import Listener, Process, Processes

GRACE = 1.0
"""Seconds that a process may be silent after its deadline."""


class PoolError(RuntimeError):
    """Processes for environments cannot be started."""


@dataclass(eq=False)
class Host(Process):
    """A process of environments."""

    holds: int = 0
    """Environments in it."""
    hung: bool = False
    """A call in it goes on beyond its limit."""


class Hosts(Processes[Host]):
    """A fixed number of processes for environments, and retired ones, which end with their environments."""

    def __init__(self, count: int, settings: PoolSettings, listener: Listener):
        """Start the processes, without waiting for them."""
        # Sets of texts have one order in all processes, and a replay meets the order that it met before.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__(count, Host, "spmdrl.env.worker", asdict(settings), listener, GRACE, fixed, settings.python)

    def enter(self, process: Host | None) -> Host:
        """Count an environment in, of this process or else of that with the fewest, and return the process."""
        process = process or min((each for each in self.all if not each.retired), key=lambda each: each.holds)
        process.holds += 1
        return process

    def leave(self, process: Host) -> None:
        """Count an environment out. A retired process is killed with its last one."""
        process.holds -= 1
        if process.retired and not process.holds:
            self.replace(process)

    def retire(self, process: Host) -> None:
        """Put a fresh process in the place of one in which a call hangs, which is killed once it is empty."""
        if not process.retired:
            self.all[self.all.index(process)] = self._spawn()
            self.all.append(process)
        process.retired = process.hung = True
        if not process.holds:
            self.replace(process)

    def aside(self) -> Host:
        """Start a further process, which is retired from the beginning."""
        process = self._spawn()
        process.retired = True
        self.all.append(process)
        return process


@dataclass(eq=False)
class Record:
    """An environment and the request that it works on."""

    key: Hashable
    number: int
    opening: Opening
    worker: Host | None = None
    """The process that it is open in; None where the next request opens it."""
    state: Any = None
    """Its newest state that could be saved, a JSON value."""
    turns: list[AssistantTurn] = field(default_factory=list)
    """The turns since that state, or since the reset."""
    digests: list[str] = field(default_factory=list)
    """Digests of the answers to them."""
    failure: str = ""
    deaths: int = 0
    """Times that its process died during the present request."""

    request: int = -1
    """Number of the request under way, -1 for none."""
    do: str = ""
    turn: AssistantTurn | None = None
    """The turn under way."""
    since: float = 0.0
    """Time at which the request began (time.monotonic())."""
    run_at: float = 0.0
    """Time at which it was last sent (time.monotonic())."""
    begun: list[tuple[str, float, int]] = field(default_factory=list)
    """Calls that began for it and may not have ended: name, time at which the limit is over, index in the turn (-1: an
    own function of the environment)."""

    @property
    def end(self) -> float:
        """Time at which the limits of these calls are over (time.monotonic())."""
        return max((end for _, end, _ in self.begun), default=float("inf"))

    def note_call(self, message: dict[str, Any]) -> None:
        """Add a call that begins."""
        if message["alone"] or (self.begun and self.begun[-1][2] < 0):  # own functions have ended when a tool is called
            self.begun.clear()
        self.begun.append((message["begins"], message["end"], message["call"]))

    def mark_late(self, calls: Iterable[int]) -> None:
        """Mark calls of the turn under way that did not answer. They are not repeated."""
        assert self.turn is not None
        for i in calls:
            self.turn.calls[i].late = True

    def message(self) -> dict[str, Any]:
        """Return the request under way, with all that opens the environment where it is in no process."""
        message: dict[str, Any] = {"id": self.request, "do": self.do, "env": self.number}
        if self.turn is not None:
            message["turn"] = _wired(self.turn)
        if self.worker is None:
            turns = [_wired(turn) for turn in self.turns]
            message["open"] = vars(self.opening) | {"key": repr(self.key), "state": self.state, "turns": turns}
            message["open"]["digests"] = self.digests
        return message

    def take_reply(self, reply: dict[str, Any]) -> None:
        """Take the fields of a reply that open the environment again out of it."""
        answer, late = reply.pop("digest", ""), reply.pop("late", [])
        if late:
            self.mark_late(late)
        if "seconds" in reply.get("counts", {}):
            reply["counts"]["seconds"] += self.run_at - self.since
        state = reply.pop("state", None)
        if state is not None:
            self.state, self.turns, self.digests = state, [], []
        elif self.turn is not None:
            self.turns.append(self.turn)
            self.digests.append(answer)
        elif self.do == "open":
            self.digests = [digest(messages) for messages in reply["replayed"]]

    def failed(self, why: str) -> str:
        """Return a failure in words that name the environment and the row."""
        whose = "" if self.do == "check" else f" of {describe(self.key)} (seed {self.opening.seed})"
        return f"the environment {self.opening.name}{whose} {why}"


def _wired(turn: AssistantTurn) -> dict[str, Any]:
    return {"content": turn.content, "message": turn.message, "calls": [vars(call) for call in turn.calls]}
