"""An open environment as the caller's side keeps it: whatever is needed to open it again in another process."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from spmdrl.data.scores import describe
from spmdrl.env.base import AssistantTurn, Opening, digest
from spmdrl.env.processes import Host


@dataclass(eq=False)
class Record:
    """An environment and the request that it works on."""

    key: Hashable
    number: int
    opening: Opening
    worker: Host | None = None
    """The process that it is open in; None where it is to be opened at the next request."""
    state: str | None = None
    """Its newest state that could be saved, as JSON text."""
    turns: list[dict] = field(default_factory=list)
    """The turns since that state, or since the reset."""
    digests: list[str] = field(default_factory=list)
    """Of the answers to them."""
    failure: str = ""
    deaths: int = 0
    """Times that its process died while it worked on the present request."""

    request: int = -1
    """Number of the request under way, -1 for none."""
    do: str = ""
    original: Any = None
    """The turn under way, as the caller gave it; of a check, the list that gets its answer."""
    turn: dict | None = None
    """The same, as it travels."""
    since: float = 0.0
    """When the request began, and `run_at`, when it last began to run again (time.monotonic())."""
    run_at: float = 0.0
    begun: list[tuple[str, float, int]] = field(default_factory=list)
    """Calls that began for it and may not have ended: name, time at which the limit is over, index in the turn (-1: an
    own function of the environment)."""

    @property
    def end(self) -> float:
        """When the limits of these calls are over (time.monotonic())."""
        return max((end for _, end, _ in self.begun), default=float("inf"))

    def begin(self, message: dict[str, Any]) -> None:
        """Take that a call begins."""
        if message["alone"] or (self.begun and self.begun[-1][2] < 0):  # own functions have ended when a tool is called
            self.begun.clear()
        self.begun.append((message["begins"], message["end"], message["call"]))

    def late(self, calls: Iterable[int]) -> None:
        """Note that calls of the turn under way did not answer. They are not made again."""
        assert self.turn is not None
        for i in calls:
            self.turn["calls"][i]["late"] = self.original.calls[i].late = True

    def message(self) -> dict[str, Any]:
        """Return the request under way, with all that opens the environment where it is in no process."""
        message: dict[str, Any] = {"id": self.request, "do": self.do, "env": self.number}
        if self.turn is not None:
            message["turn"] = self.turn
        if self.worker is None:
            opening = self.opening
            message["open"] = {
                "name": opening.name,
                "key": repr(self.key),
                "row": opening.row,
                "seed": opening.seed,
                "settings": opening.settings,
                "state": self.state,
                "turns": self.turns,
                "digests": self.digests,
            }
        return message

    def keep(self, reply: dict[str, Any]) -> None:
        """Take what a reply says of the state after it, and out of the reply."""
        done, answer = self.turn, reply.pop("digest", "")
        if late := reply.pop("late", []):
            self.late(late)
        if "seconds" in reply.get("counts", {}):
            reply["counts"]["seconds"] += self.run_at - self.since
        state = reply.pop("state", None)
        if state is not None:
            self.state, self.turns, self.digests = state, [], []
        elif done is not None:
            self.turns.append(done)
            self.digests.append(answer)
        elif self.do == "open":
            self.digests = [digest(messages) for messages in reply["replayed"]]

    def failed(self, why: str) -> str:
        """Return a failure in words that name the environment and the row."""
        return f"the environment {self.opening.name} of {describe(self.key)} (seed {self.opening.seed}) {why}"


def wired(turn: AssistantTurn) -> dict[str, Any]:
    """Return a turn as it travels to a process."""
    calls = [
        {
            "name": str(call.name),
            "arguments": call.arguments,
            "id": str(call.id or ""),
            "error": str(call.error),
            "late": bool(getattr(call, "late", False)),
        }
        for call in turn.calls
    ]
    return {"content": turn.content, "message": turn.message, "calls": calls}
