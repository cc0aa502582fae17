"""Finds out where all ranks are when a job ends. A few ranks read all heartbeats and write a summary for the other
ranks.

If every rank of a 1,024-rank job read all heartbeats, the store would have to send a million of them (200 MB) while the
job is ending, and the flight records would contain just as many.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

READERS = 8
"""Number of ranks that read all ranks' beats. The readers are the first ranks to exit."""
STALE = 6.0
"""Seconds without a beat after which a rank counts as silent."""
SHOWN = 4
"""Maximum number of ranks that a message names."""
PLACES = 32
"""Maximum number of places listed. Ranks at other places are counted together."""
LOOKS, PAUSE = 10, 0.1
"""Number of times that a rank checks for a reader's summary, and the seconds between checks."""

Age = Callable[[dict], float]
"""Function that returns the seconds since a beat."""


@dataclass
class Place:
    """A source line and the ranks that are currently at it."""

    place: str
    silent: bool
    count: int = 0
    first: dict[str, dict] = field(default_factory=dict)
    """Rank -> its last beat, for the first SHOWN + 1 ranks (one extra, because a message omits its own rank)."""


def key_of(beat: dict, age: Age) -> tuple[str, bool]:
    """Return a rank's source line, and whether the rank has stopped reporting. The line of a silent rank is empty."""
    silent = age(beat) > STALE
    return "" if silent else beat["place"], silent


def grouped(beats: dict[int, dict], age: Age) -> list[Place]:
    """Group ranks by place, ordered by each group's first rank."""
    found: dict[tuple[str, bool], Place] = {}
    for rank, beat in sorted(beats.items()):
        key = key_of(beat, age)
        if key not in found and not key[1] and len(found) >= PLACES:
            key = ("one of many places", False)
        group = found.setdefault(key, Place(*key))
        group.count += 1
        if len(group.first) <= SHOWN:
            group.first[str(rank)] = beat
    return list(found.values())


class Overview:
    """The current place of each rank (best effort), collected by a rank that is exiting."""

    def __init__(self, store: dist.Store, read: Callable[[], dict[int, dict]], age: Age):
        """Start without beats. store: a second connection to the heartbeat's store. read: returns all ranks' beats."""
        self.store, self.read, self.age = store, read, age
        self.reader: bool | None = None

    def beats(self) -> dict[int, dict]:
        """Return a dict from rank to last beat if this rank is one of the first READERS to ask, otherwise {}."""
        if self.reader is None:
            self.reader = self.store.add("readers", 1) <= READERS
        return self.read() if self.reader else {}

    def places(self) -> list[Place]:
        """Return the ranks grouped by place, from beats or a reader's summary, or [] if neither is available."""
        if found := self.beats():
            groups = grouped(found, self.age)
            newest = max(beat["count"] for beat in found.values())
            with suppress(Exception):
                self.store.set("overview", json.dumps({"count": newest, "places": [asdict(g) for g in groups]}))
            return groups
        for _ in range(0 if self.reader else LOOKS):
            if self.store.check(["overview"]):
                summary = json.loads(self.store.get("overview"))
                # An old summary comes from a rank that exited earlier, for another reason.
                if self.age(summary) <= STALE:
                    return [Place(**place) for place in summary["places"]]
            time.sleep(PAUSE)
        return []

    def missing(self, me: int, here: str, stopped: dict[int, dict]) -> str:
        """Return, as text, the ranks that this rank's collective is waiting for. Empty if unknown.

        here: this rank's place. stopped: last beats of ranks on this machine whose processes are stopped.
        """
        other = [group for group in self.places() if group.silent or group.place != here]
        count = sum(group.count - (str(me) in group.first) for group in other)
        # A stopped rank whose last beat was at this place is not counted above.
        keys = {(group.place, group.silent) for group in other}
        count += sum(key_of(beat, self.age) not in keys for beat in stopped.values())
        beats = {
            int(r): beat for g in other for r, beat in g.first.items() if g.silent or beat["place"] != here
        } | stopped
        beats.pop(me, None)
        named = [self._described(rank, beats[rank], rank in stopped) for rank in sorted(beats)[:SHOWN]]
        more = f" and {count - len(named)} more" if count > len(named) else ""
        return ", ".join(named) + more

    def _described(self, rank: int, beat: dict, stopped: bool) -> str:
        age = self.age(beat)
        if stopped or age > STALE:
            why = "its process is stopped" if stopped else "its process or its machine is stopped or gone"
            return (
                f"rank {rank} has sent no heartbeat for {age:.0f} s, since phase {beat['phase']} at {beat['place']} "
                f"({why})"
            )
        return (
            f"rank {rank} has been in phase {beat['phase']} of step {beat['step']} at {beat['place']} for "
            f"{age + beat['stood']:.0f} s"
        )
