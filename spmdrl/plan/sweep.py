"""Other settings for a job: the nearest that fit where it does not, or several ranked by their least time."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from spmdrl.plan.changes import Change, changed, changes_of
from spmdrl.plan.readers import folder_of
from spmdrl.plan.report import gib
from spmdrl.plan.run import GIB, OUTSIDE, Plan, plan

NEAREST = 8
"""Most plans in search of one that fits: a plan of 671 G parameters takes tens of seconds on two cores."""
SINGLES = 5
"""Of those, plans of a single change."""
SWEPT = 12
"""Most plans of a sweep."""


@dataclass
class Row:
    """One plan with changed settings."""

    change: Change | None
    """None: the settings as they were given."""
    fits: bool
    spare: int
    """Bytes to spare on a device, or on a node's host where that lacks more; negative where it does not fit."""
    seconds: float
    """Least seconds of a step."""
    phase: str
    """The phase that takes most of a device; `host` where a node's host memory is what lacks."""
    room: dict[str, int]
    """Bytes to spare in each phase, in the KV cache (`cache`, at most 0) and on a node's host (`host`)."""

    @property
    def flags(self) -> str:
        """The changed flags."""
        return self.change.flags if self.change else ""

    def facts(self) -> dict[str, Any]:
        """Return the row as values for JSON: bytes and seconds."""
        named = {"flags": self.flags, "fits": self.fits, "spare_bytes": self.spare}
        return named | {"least_seconds": self.seconds, "phase": self.phase, "room_bytes": self.room}


@dataclass
class Tried:
    """Plans with changed settings."""

    rows: list[Row]
    left_out: int
    """Changes that were allowed, and not planned."""
    swept: bool
    """True for a sweep, ranked; False for a search that ends with the first row that fits."""
    failed: list[str]
    """Changes that could not be planned, each with the last line of the reason."""

    def facts(self) -> dict[str, Any]:
        """Return all of it as values for JSON."""
        return {"rows": [row.facts() for row in self.rows], "left_out": self.left_out, "failed": self.failed}


def row_of(made: Plan, change: Change | None = None) -> Row:
    """Make the row of a plan."""
    memory = int(made.gpu.memory_gib * GIB) - OUTSIDE
    room: dict[str, int] = {}
    for planned in made.kinds:
        for phase, tags in planned.rank.memory.items():
            free = memory - sum(tags.values())
            room[phase] = min(free, room.get(phase, free))
    room["cache"] = -max((p.engine.get("lack", 0) for p in made.kinds), default=0)
    phase, spare = made.worst().peak()[0], made.spare
    if made.host_spare is not None:
        room["host"] = made.host_spare
        if room["host"] < min(0, spare):
            phase, spare = "host", room["host"]
    return Row(change, made.fits, spare, made.seconds, phase, room)


def nearest(made: Plan) -> Tried:
    """Plan a job that does not fit with one change, then with two, until it fits or `NEAREST` plans are made."""
    base = row_of(made)
    lacking = {name for name, free in base.room.items() if free < 0}
    helpful = [c for c in changes_of(made.cfg, made.world, _config_of(made)) if c.frees & lacking]
    # Those that help in most of the places come first; among them each setting's first value.
    helpful.sort(key=lambda change: -len(change.frees & lacking))
    rows: list[Row] = []
    failed: list[str] = []
    for row in _planned(made, helpful[:SINGLES], failed):
        rows.append(row)
        if row.fits:
            break
    left = len(helpful) - len(rows) - len(failed)
    if not any(row.fits for row in rows):
        for row in _planned(made, _pairs(base, rows)[: NEAREST - SINGLES], failed):
            rows.append(row)
            if row.fits:
                break
    return Tried(rows, left, False, failed)


def _pairs(base: Row, rows: list[Row]) -> list[Change]:
    """Return two changes together, those first that would leave most room if their effects added up."""

    def least(a: Row, b: Row) -> int:
        sums = {name: a.room.get(name, free) + b.room.get(name, free) - free for name, free in base.room.items()}
        return min(sums.values())

    short = [name for name, free in base.room.items() if free < 0]
    useful = [row for row in rows if row.change and any(row.room.get(name, 0) > base.room[name] for name in short)]
    pairs = [(a, b) for a, b in combinations(useful, 2) if a.change and b.change and not a.change.meets(b.change)]
    pairs.sort(key=lambda pair: -least(*pair))
    return [a.change + b.change for a, b in pairs if a.change and b.change]


def sweep(made: Plan) -> Tried:
    """Plan a job with single changes, and rank them beside the job as it is: those that fit by their least seconds."""
    changes, failed = changes_of(made.cfg, made.world, _config_of(made)), []
    rows = [row_of(made), *_planned(made, changes[: SWEPT - 1], failed)]
    rows.sort(key=lambda row: (not row.fits, row.seconds if row.fits else -row.spare))
    return Tried(rows, max(0, len(changes) - (SWEPT - 1)), True, failed)


def _planned(made: Plan, changes: list[Change], failed: list[str]) -> Iterator[Row]:
    """Plan changes one by one; `failed` takes those that cannot be planned, which end no search."""
    for change in changes:
        print(f"trying {change.flags}", file=sys.stderr, flush=True)
        try:
            yield row_of(plan(changed(made.cfg, change), made.world, made.gpu), change)
        except (ValueError, RuntimeError) as error:
            failed.append(f"{change.flags}: {str(error).strip().splitlines()[-1]}")


def _config_of(made: Plan) -> Any:
    from transformers import AutoConfig

    trust = made.cfg.model.trust_remote_code
    return AutoConfig.from_pretrained(os.fspath(folder_of(made.cfg.model.path, trust)), trust_remote_code=trust)


def sweep_lines(tried: Tried) -> list[str]:
    """Return what was tried as text."""
    failed = [f"cannot be planned: {line}" for line in tried.failed]
    if not tried.rows:
        return [*failed, "no change that the settings and the model allow helps here"]
    lines = [f"{'GiB to spare':>12} {'least s':>9}  {'fullest':<8} changes"]
    for row in tried.rows:
        verdict = "" if row.fits else "  (does not fit)"
        changes = row.flags or "none: as it was given"
        lines.append(f"{gib(row.spare):>12} {row.seconds:>9,.3g}  {row.phase:<8} {changes}{verdict}")
    if tried.left_out:
        lines.append(f"{tried.left_out} more single changes are allowed, and were not planned")
    lines += failed
    last = tried.rows[-1]
    if tried.swept:
        best = tried.rows[0]
        lines.append(f"best     {best.flags or 'as it was given'}" if best.fits else "best     none of these fits")
    elif last.fits:
        lines.append(f"nearest that fits: {last.flags} ({gib(last.spare)} GiB to spare)")
    else:
        best = max(tried.rows, key=lambda row: row.spare)
        lines.append(
            f"no single change of these fits, nor do two together; the nearest, {best.flags}, lacks "
            f"{gib(-best.spare)} GiB: take more ranks, or GPUs with more memory"
        )
    return lines
