"""Compares the flight records of a failed run: `python -m spmdrl.tools.flight RUN`.

A flight record is a file that a rank writes when the run fails, with its stack and its latest collectives in each
process group. For every group, the report shows the first collective whose operation or sizes differ between ranks,
with the file and line on each rank. If all match, the report shows the ranks that did not reach the latest collective,
and the first collective that ranks started at different lines. It also lists ranks that left no record because they
were killed or their machine is gone.
"""

import json
import sys
from pathlib import Path
from typing import Any

RAGGED = ("alltoall", "all_to_all", "gather", "scatter")
"""Name substrings of collectives whose sizes may differ between ranks."""
NUMBER = (int, float)
_ROW = {"number": int, "op": str, "place": str, "sizes": object}
SHAPE = {
    **{"job": str, "time": NUMBER, "rank": int, "host": str, "step": int, "phase": str, "why": str, "stack": [str]},
    "groups": {None: {"ranks": [int], "begun": int, "last": [_ROW]}},
    "others": {None: {"phase": str, "step": int, "place": str, "time": NUMBER}},
}
"""Types of the record fields that this program reads; the key None matches every name."""


def _wrong(value: Any, shape: Any, name: str = "") -> str:
    """Return the reason why a value does not match the types in `shape`, or "" if it does."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind):
        return f"{name or 'the record'} is not of type {getattr(kind, '__name__', 'number')}"
    if isinstance(shape, list):
        return next(filter(None, (_wrong(item, shape[0], f"an entry of {name}") for item in value)), "")
    if not isinstance(shape, dict):
        return ""
    inner = [(key, shape[None]) for key in value] if None in shape else shape.items()
    missing = next((key for key, _ in inner if key not in value), None)
    if missing is not None:
        return f"{name or 'the record'} has no {missing!r}"
    return next(filter(None, (_wrong(value[key], part, f"{name}.{key}".lstrip(".")) for key, part in inner)), "")


def read(folder: Path) -> list[dict]:
    """Return the records of the latest failure in a run folder, sorted by file name.

    Raises:
        ValueError: there are no records, or one of them cannot be read.
    """
    records = []
    for path in sorted((folder / "flight").glob("rank_*.json")):
        try:
            record = json.loads(path.read_text())
            if reason := _wrong(record, SHAPE):
                raise ValueError(reason)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a flight record: {error}; remove the file to see the others") from error
        records.append(record)
    if not records:
        raise ValueError(f"{folder}/flight contains no records: a run writes them when it fails")
    job = max(records, key=lambda record: record["time"])["job"]
    return [record for record in records if record["job"] == job]


def _kind(row: dict) -> str:
    """Return the name of the collective, plus its sizes if the collective requires them to match on all ranks."""
    ragged = any(word in row["op"] for word in RAGGED)
    return row["op"] if ragged else f"{row['op']} {row['sizes']}"


def compare(records: list[dict]) -> list[str]:
    """Return lines that describe how the collectives of each group differ between ranks, or [] if they do not."""
    lines = []
    names = sorted({name for record in records for name in record["groups"]})
    for name in names:
        mine = {record["rank"]: record["groups"][name] for record in records if name in record["groups"]}
        if len(mine) < 2:
            continue
        ranks = next(iter(mine.values()))["ranks"]
        rows = {rank: {row["number"]: row for row in group["last"]} for rank, group in mine.items()}
        shared = set.intersection(*(set(numbered) for numbered in rows.values()))
        head = f"group {name} of ranks {', '.join(map(str, ranks))}"
        odd = next((n for n in sorted(shared) if len({_kind(rows[rank][n]) for rank in rows}) > 1), None)
        if odd is not None:
            lines.append(f"{head}: collective {odd} differs")
            lines += [f"  rank {rank}: {_kind(rows[rank][odd])} at {rows[rank][odd]['place']}" for rank in rows]
            continue
        most = max(group["begun"] for group in mine.values())
        behind = [rank for rank, group in mine.items() if group["begun"] < most]
        if behind:
            ahead = next(rank for rank, group in mine.items() if group["begun"] == most)
            first = min(mine[rank]["begun"] for rank in behind) + 1
            row = rows[ahead].get(first)
            where = f" ({_kind(row)} at {row['place']})" if row else ""
            who = f"{'rank' if len(behind) == 1 else 'ranks'} {', '.join(map(str, behind))}"
            lines.append(f"{head}: {who} did not reach collective {first}, which rank {ahead} started{where}")
        places = {n: {rank: rows[rank][n]["place"] for rank in rows} for n in shared}
        other = next((n for n in sorted(places) if len(set(places[n].values())) > 1), None)
        if other is not None:
            lines.append(f"{head}: collective {other} was started at different lines")
            lines += [f"  rank {rank}: {_kind(rows[rank][other])} at {place}" for rank, place in places[other].items()]
    return lines


def report(folder: Path) -> list[str]:
    """Return the report about the failed run in a folder, as lines."""
    records = read(folder)
    lines = []
    for record in sorted(records, key=lambda record: record["time"]):
        where = next(iter(record["stack"]), "?")
        lines.append(
            f"rank {record['rank']} on {record['host']}: step {record['step']}, phase {record['phase']}, in {where}"
        )
        lines.append(f"  {record['why']}")
    here = {record["rank"] for record in records}
    everyone = {rank for record in records for group in record["groups"].values() for rank in group["ranks"]}
    for rank in sorted(everyone - here):
        beats = [record["others"][str(rank)] for record in records if str(rank) in record["others"]]
        last = max(beats, key=lambda beat: beat["time"], default=None)
        where = f"last seen in phase {last['phase']} of step {last['step']} at {last['place']}" if last else "?"
        lines.append(f"rank {rank} left no record (killed, or its machine is gone): {where}")
    return lines + (compare(records) or ["no group in which the ranks differ"])


def main() -> None:
    """Print the report of one run folder."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m spmdrl.tools.flight RUN")
    try:
        print("\n".join(report(Path(sys.argv[1]))))
    except (ValueError, OSError) as error:
        sys.exit(f"python -m spmdrl.tools.flight: {error}")


if __name__ == "__main__":
    main()
