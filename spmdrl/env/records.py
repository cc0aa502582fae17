"""The caller's records of environments, from which it can reopen them, and the processes that run environments."""

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdrl.data.scores import describe
from spmdrl.env.base import AssistantTurn, Opening, PoolSettings, digest
from spmdrl.workers.processes import Listener, Process, Processes

GRACE = 1.0
"""Maximum number of seconds that a process may be silent after its deadline before it is killed."""


class PoolError(RuntimeError):
    """The processes that run environments could not be started."""


@dataclass(eq=False)
class Host(Process):
    """A process that runs environments."""

    holds: int = 0
    """Number of environments that are assigned to the process."""
    hung: bool = False
    """True if a call in the process still runs after its time limit."""


class Hosts(Processes[Host]):
    """A fixed number of environment processes, plus retired processes.

    A retired process takes no new requests, and is killed when it has no environments left.
    """

    def __init__(self, count: int, settings: PoolSettings, listener: Listener):
        """Start the processes, without waiting for them."""
        # With a fixed hash seed, sets of strings have the same order in all processes, as a replay requires.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__(count, Host, "spmdrl.env.worker", asdict(settings), listener, GRACE, fixed, settings.python)

    def enter(self, process: Host | None) -> Host:
        """Assign an environment to a process, by default the one with the fewest environments. Return the process."""
        process = process or min((each for each in self.all if not each.retired), key=lambda each: each.holds)
        process.holds += 1
        return process

    def leave(self, process: Host) -> None:
        """Remove an environment from a process. A retired process is killed when it has no more environments."""
        process.holds -= 1
        if process.retired and not process.holds:
            self.replace(process)

    def retire(self, process: Host) -> None:
        """Replace a process in which a call hangs. The old process is killed when it has no more environments."""
        if not process.retired:
            self.all[self.all.index(process)] = self._spawn()
            self.all.append(process)
        process.retired = process.hung = True
        if not process.holds:
            self.replace(process)

    def aside(self) -> Host:
        """Start and return an additional process that is already retired, so that it takes no new requests."""
        process = self._spawn()
        process.retired = True
        self.all.append(process)
        return process


@dataclass(eq=False)
class Record:
    """An open environment and its current request."""

    key: Hashable
    number: int
    opening: Opening
    worker: Host | None = None
    """The process that has the environment open, or None if the next request must open the environment."""
    state: Any = None
    """The environment's last saved state as a JSON value, or None if no state was saved."""
    turns: list[AssistantTurn] = field(default_factory=list)
    """The turns after `state` was saved, or after the reset if `state` is None."""
    digests: list[str] = field(default_factory=list)
    """Digests of the environment's answers to `turns`."""
    failure: str = ""
    deaths: int = 0
    """Number of process deaths during the current request."""

    request: int = -1
    """Number of the current request, or -1 if there is none."""
    do: str = ""
    turn: AssistantTurn | None = None
    """The turn of the current request."""
    since: float = 0.0
    """Start time of the current request (time.monotonic())."""
    run_at: float = 0.0
    """Time when the current request was last sent (time.monotonic())."""
    begun: list[tuple[str, float, int]] = field(default_factory=list)
    """Calls of the current request that have started and may still be running: (name, deadline, index in the turn). The
    index is -1 for functions that are not tools."""

    @property
    def end(self) -> float:
        """Return the latest deadline of the calls in `begun` (time.monotonic()), or infinity if there are none."""
        return max((end for _, end, _ in self.begun), default=float("inf"))

    def note_call(self, message: dict[str, Any]) -> None:
        """Add a call to `begun`. message: the message in which a process announced the call."""
        # Functions that are not tools have returned by the time a tool is called.
        if message["alone"] or (self.begun and self.begun[-1][2] < 0):
            self.begun.clear()
        self.begun.append((message["begins"], message["end"], message["call"]))

    def mark_late(self, calls: Iterable[int]) -> None:
        """Mark calls of the current turn that exceeded their time limit, so that they are not repeated."""
        assert self.turn is not None
        for i in calls:
            self.turn.calls[i].late = True

    def message(self) -> dict[str, Any]:
        """Return the current request as a message, with data to open the environment if no process has it open."""
        message: dict[str, Any] = {"id": self.request, "do": self.do, "env": self.number}
        if self.turn is not None:
            message["turn"] = _wired(self.turn)
        if self.worker is None:
            turns = [_wired(turn) for turn in self.turns]
            message["open"] = vars(self.opening) | {"key": repr(self.key), "state": self.state, "turns": turns}
            message["open"]["digests"] = self.digests
        return message

    def take_reply(self, reply: dict[str, Any]) -> None:
        """Move the fields that are needed only to reopen the environment from a reply into this record."""
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
        """Return a failure message: the names of the environment and the sample, followed by the text `why`."""
        whose = "" if self.do == "check" else f" of {describe(self.key)} (seed {self.opening.seed})"
        return f"the environment {self.opening.name}{whose} {why}"


def _wired(turn: AssistantTurn) -> dict[str, Any]:
    return {"content": turn.content, "message": turn.message, "calls": [vars(call) for call in turn.calls]}
