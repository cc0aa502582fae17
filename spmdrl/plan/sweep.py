"""Plans a job with changed settings, to find settings that fit or to rank alternatives by minimum step time."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from spmdrl.plan.changes import Change, changed, changes_of
from spmdrl.plan.kinds import config_of
from spmdrl.plan.report import gib
from spmdrl.plan.run import GIB, OUTSIDE, Plan, plan

NEAREST = 8
"""Maximum number of plans when searching for settings that fit; each takes tens of seconds for 671B parameters."""
SINGLES = 5
"""Maximum number of single-change plans in this search; later plans combine two changes."""
SWEPT = 12
"""Maximum number of plans in a sweep, including the plan for the job's own settings."""


@dataclass
class Row:
    """One plan with changed settings."""

    change: Change | None
    """The change, or None for the job's own settings."""
    fits: bool
    spare: int
    """Free bytes on the fullest device. If memory is short on that device, in an engine's KV cache or on a node's host,
    the value is minus the largest shortfall."""
    seconds: float
    """Lower bound on the step time in seconds."""
    phase: str
    """The phase with the highest device memory use, or `host` if host memory has the largest shortfall."""
    free: dict[str, int]
    """Maps each phase to the free bytes of device memory in that phase. `host` maps to a node's free host memory, if
    known. `cache` maps to 0 if every KV cache is large enough, or else minus the largest shortfall."""

    @property
    def flags(self) -> str:
        """The change as command-line flags, or an empty string for the job's own settings."""
        return self.change.flags if self.change else ""

    def facts(self) -> dict[str, Any]:
        """Return the row as JSON-serialisable values, in bytes and seconds."""
        named = {"flags": self.flags, "fits": self.fits, "spare_bytes": self.spare}
        return named | {"least_seconds": self.seconds, "phase": self.phase, "room_bytes": self.free}


@dataclass
class Tried:
    """Plans with changed settings."""

    rows: list[Row]
    left_out: int
    """Number of allowed changes that were not planned."""
    swept: bool
    """True for a ranked sweep; False for a search that stops at the first row that fits."""
    failed: list[str]
    """Changes that could not be planned, each with the last line of the error."""

    def facts(self) -> dict[str, Any]:
        """Return all rows and counts as JSON-serialisable values."""
        return {"rows": [row.facts() for row in self.rows], "left_out": self.left_out, "failed": self.failed}


def row_of(made: Plan, change: Change | None = None) -> Row:
    """Return a plan as a row. change: the change that was planned, or None for the job's own settings."""
    memory = int(made.gpu.memory_gib * GIB) - OUTSIDE
    free: dict[str, int] = {}
    for planned in made.kinds:
        for phase, tags in planned.rank.memory.items():
            left = memory - sum(tags.values())
            free[phase] = min(left, free.get(phase, left))
    free["cache"] = -max((p.engine.get("lack", 0) for p in made.kinds), default=0)
    phase, spare = made.worst().peak()[0], made.spare
    if made.host_spare is not None:
        free["host"] = made.host_spare
        if free["host"] < min(0, spare):
            phase, spare = "host", free["host"]
    return Row(change, made.fits, spare, made.seconds, phase, free)


def nearest(made: Plan) -> Tried:
    """Plan single changes, then pairs, for a job that does not fit, until one fits or `NEAREST` plans are made."""
    base = row_of(made)
    lacking = {name for name, left in base.free.items() if left < 0}
    helpful = [c for c in changes_of(made.cfg, made.world, config_of(made.cfg)) if c.frees & lacking]
    # Try changes that help with the most shortfalls first; the sort is stable, so ties keep their order.
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
    """Return pairs of changes that do not conflict, most promising first.

    Pairs are sorted by an estimate of the smallest amount of free memory in any phase, the KV cache or the host. The
    estimate adds up the effects of the two changes.
    """

    def least(a: Row, b: Row) -> int:
        sums = {name: a.free.get(name, left) + b.free.get(name, left) - left for name, left in base.free.items()}
        return min(sums.values())

    short = [name for name, left in base.free.items() if left < 0]
    useful = [row for row in rows if row.change and any(row.free.get(name, 0) > base.free[name] for name in short)]
    pairs = [(a, b) for a, b in combinations(useful, 2) if a.change and b.change and not a.change.conflicts(b.change)]
    pairs.sort(key=lambda pair: -least(*pair))
    return [a.change + b.change for a, b in pairs if a.change and b.change]


def sweep(made: Plan) -> Tried:
    """Plan a job with each single change, and rank these plans together with the job's own.

    Plans that fit come first, fastest first. Plans that do not fit follow, by increasing shortfall.
    """
    changes, failed = changes_of(made.cfg, made.world, config_of(made.cfg)), []
    rows = [row_of(made), *_planned(made, changes[: SWEPT - 1], failed)]
    rows.sort(key=lambda row: (not row.fits, row.seconds if row.fits else -row.spare))
    return Tried(rows, max(0, len(changes) - (SWEPT - 1)), True, failed)


def _planned(made: Plan, changes: list[Change], failed: list[str]) -> Iterator[Row]:
    """Plan the job with each change and yield a row per plan; append changes that cannot be planned to `failed`."""
    for change in changes:
        print(f"trying {change.flags}", file=sys.stderr, flush=True)
        try:
            yield row_of(plan(changed(made.cfg, change), made.world, made.gpu), change)
        except (ValueError, RuntimeError) as error:
            failed.append(f"{change.flags}: {str(error).strip().splitlines()[-1]}")


def sweep_lines(tried: Tried) -> list[str]:
    """Return the report lines for these plans."""
    failed = [f"cannot be planned: {line}" for line in tried.failed]
    if not tried.rows:
        return [*failed, "no change of one setting that can be planned frees the missing memory"]
    lines = [f"{'GiB to spare':>12} {'least s':>9}  {'fullest':<8} changes"]
    for row in tried.rows:
        verdict = "" if row.fits else "  (does not fit)"
        changes = row.flags or "none (the job's settings)"
        lines.append(f"{gib(row.spare):>12} {row.seconds:>9,.3g}  {row.phase:<8} {changes}{verdict}")
    if tried.left_out:
        more = "1 more single change is" if tried.left_out == 1 else f"{tried.left_out} more single changes are"
        lines.append(f"{more} possible but not planned")
    lines += failed
    last = tried.rows[-1]
    if tried.swept:
        best = tried.rows[0]
        lines.append(f"best     {best.flags or 'the job as it is'}" if best.fits else "best     none of these fits")
    elif last.fits:
        lines.append(f"nearest that fits: {last.flags} ({gib(last.spare)} GiB to spare)")
    else:
        best = max(tried.rows, key=lambda row: row.spare)
        lines.append(
            f"none of these plans fits; the nearest, with {best.flags}, lacks {gib(-best.spare)} GiB: take more ranks, "
            "or GPUs with more memory"
        )
    return lines
