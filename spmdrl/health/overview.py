"""The phases of all ranks of a job that ends: a few read the beats of all, and write down what the others need of them.

Were every rank of a job of 1,024 to read the beats of all, the store would have to send a million of them (200 MB) in
the seconds in which the job ends, and as many would stand in the flight records.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

READERS = 8
"""Ranks that read the beats of all ranks: the first that ask."""
STALE = 6.0
"""Seconds without a beat after which a rank counts as silent."""
SHOWN = 4
"""Ranks that a message names."""
PLACES = 32
"""Places whose ranks are told apart; ranks at further places count together."""
LOOKS, PAUSE = 10, 0.1
"""How often a rank looks for the summary of a reader, and the seconds between."""

Age = Callable[[dict], float]
"""Function that gives the seconds since a beat."""


@dataclass
class Place:
    """Ranks that are at the same line."""

    place: str
    silent: bool
    count: int = 0
    first: dict[str, dict] = field(default_factory=dict)
    """Rank -> its last beat, of the first ranks; more than a message names, as one of them may be this rank."""


def key_of(beat: dict, age: Age) -> tuple[str, bool]:
    """A rank's place, and True if it is silent; silent ranks are together wherever they are."""
    silent = age(beat) > STALE
    return "" if silent else beat["place"], silent


def grouped(beats: dict[int, dict], age: Age) -> list[Place]:
    """Groups ranks by their place, in the order of the first rank of each."""
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
    """The facts that one rank can learn about all others when it ends."""

    def __init__(self, store: dist.Store, read: Callable[[], dict[int, dict]], age: Age):
        """Makes it, and asks for nothing yet.

        Args:
            store: keys of the heartbeat, over a connection that the main thread does not use.
            read: reads the last beats of all ranks.
            age: seconds since a beat.
        """
        self.store, self.read, self.age = store, read, age
        self.reader: bool | None = None

    def beats(self) -> dict[int, dict]:
        """The last beats of all ranks where this is one of the first ranks that ask, else none."""
        if self.reader is None:
            self.reader = self.store.add("readers", 1) <= READERS
        return self.read() if self.reader else {}

    def places(self) -> list[Place]:
        """Ranks by their place: as this rank finds them, or as a reader has written them; empty if none has."""
        if found := self.beats():
            groups = grouped(found, self.age)
            newest = max(beat["count"] for beat in found.values())
            with suppress(Exception):
                self.store.set("overview", json.dumps({"count": newest, "places": [asdict(g) for g in groups]}))
            return groups
        for _ in range(0 if self.reader else LOOKS):
            if self.store.check(["overview"]):
                told = json.loads(self.store.get("overview"))
                # One that is older stems from a rank that ended alone and long ago.
                if self.age(told) <= STALE:
                    return [Place(**place) for place in told["places"]]
            time.sleep(PAUSE)
        return []

    def missing(self, me: int, here: str, stopped: dict[int, dict]) -> str:
        """Ranks that a collective of this rank waits for, in words; empty where none stands out.

        Args:
            me: this rank.
            here: its place.
            stopped: the last beats of ranks whose processes this rank sees to be stopped.
        """
        other = [group for group in self.places() if group.silent or group.place != here]
        count = sum(group.count - (str(me) in group.first) for group in other)
        # A stopped rank that still counts as being here is not among those.
        keys = {(group.place, group.silent) for group in other}
        count += sum(key_of(beat, self.age) not in keys for beat in stopped.values())
        beats = {
            int(r): beat for g in other for r, beat in g.first.items() if g.silent or beat["place"] != here
        } | stopped
        beats.pop(me, None)
        said = [self._words(rank, beats[rank], rank in stopped) for rank in sorted(beats)[:SHOWN]]
        more = f" and {count - len(said)} more" if count > len(said) else ""
        return ", ".join(said) + more

    def _words(self, rank: int, beat: dict, stopped: bool) -> str:
        age = self.age(beat)
        if stopped or age > STALE:
            why = "its process is stopped" if stopped else "its process or its machine is stopped or gone"
            return (
                f"rank {rank} has not been heard of for {age:.0f} s, since phase {beat['phase']} at {beat['place']} "
                f"({why})"
            )
        return (
            f"rank {rank} is in phase {beat['phase']} of step {beat['step']} at {beat['place']} for "
            f"{age + beat['stood']:.0f} s"
        )
