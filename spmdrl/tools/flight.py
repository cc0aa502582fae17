"""Compares the flight records of a failed run: `python -m spmdrl.tools.flight RUN`.

For every process group it shows the first collective in which ranks differ, with file and line on each, and the ranks
that have not come to the last one. Ranks that were killed have left no record and are named.
"""

import json
import sys
from pathlib import Path
from typing import Any

RAGGED = ("alltoall", "all_to_all", "gather", "scatter")
"""Words in the names of collectives whose sizes differ between ranks by design."""


NUMBER = (int, float)
_ROW = {"number": int, "op": str, "place": str, "sizes": object}
SHAPE = {
    **{"job": str, "time": NUMBER, "rank": int, "host": str, "step": int, "phase": str, "why": str, "stack": [str]},
    "groups": {None: {"ranks": [int], "begun": int, "last": [_ROW]}},
    "others": {None: {"phase": str, "step": int, "place": str, "time": NUMBER}},
}
"""Shape of a record's fields that are read; under None: of the fields of every entry."""


def wrong(value: Any, shape: Any, name: str = "") -> str:
    """Reason why a value does not have a shape; empty where it does."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind):
        return f"{name or 'the whole'} is no {getattr(kind, '__name__', 'number')}"
    if isinstance(shape, list):
        return next(filter(None, (wrong(item, shape[0], f"an entry of {name}") for item in value)), "")
    if not isinstance(shape, dict):
        return ""
    inner = [(key, shape[None]) for key in value] if None in shape else shape.items()
    missing = next((key for key, _ in inner if key not in value), None)
    if missing is not None:
        return f"{name or 'it'} has no {missing!r}"
    return next(filter(None, (wrong(value[key], part, f"{name}.{key}".lstrip(".")) for key, part in inner)), "")


def read(folder: Path) -> list[dict]:
    """The records of the newest failure, in rank order.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    records = []
    for path in sorted((folder / "flight").glob("rank_*.json")):
        try:
            record = json.loads(path.read_text())
            if said := wrong(record, SHAPE):
                raise ValueError(said)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no flight record: {error}; remove it to see the others") from error
        records.append(record)
    if not records:
        raise ValueError(f"{folder}/flight holds no records: a run writes them when it fails")
    job = max(records, key=lambda record: record["time"])["job"]
    return [record for record in records if record["job"] == job]


def kind(row: dict) -> str:
    """Operation and sizes, which must be alike on all ranks of one collective."""
    ragged = any(word in row["op"] for word in RAGGED)
    return row["op"] if ragged else f"{row['op']} {row['sizes']}"


def compare(records: list[dict]) -> list[str]:
    """Lines that say where ranks went different ways, by group; empty where they did not."""
    told = []
    names = sorted({name for record in records for name in record["groups"]})
    for name in names:
        mine = {record["rank"]: record["groups"][name] for record in records if name in record["groups"]}
        if len(mine) < 2:
            continue
        ranks = next(iter(mine.values()))["ranks"]
        rows = {rank: {row["number"]: row for row in group["last"]} for rank, group in mine.items()}
        shared = set.intersection(*(set(numbered) for numbered in rows.values()))
        head = f"group {name} of ranks {', '.join(map(str, ranks))}"
        odd = next((n for n in sorted(shared) if len({kind(rows[rank][n]) for rank in rows}) > 1), None)
        if odd is not None:
            told.append(f"{head}: collective {odd} differs")
            told += [f"  rank {rank}: {kind(rows[rank][odd])} at {rows[rank][odd]['place']}" for rank in rows]
            continue
        most = max(group["begun"] for group in mine.values())
        behind = [rank for rank, group in mine.items() if group["begun"] < most]
        if behind:
            ahead = next(rank for rank, group in mine.items() if group["begun"] == most)
            first = min(mine[rank]["begun"] for rank in behind) + 1
            row = rows[ahead].get(first)
            where = f" ({kind(row)} at {row['place']})" if row else ""
            told.append(
                f"{head}: rank {', '.join(map(str, behind))} did not come to collective {first}, which rank {ahead} "
                f"began{where}"
            )
        places = {n: {rank: rows[rank][n]["place"] for rank in rows} for n in shared}
        other = next((n for n in sorted(places) if len(set(places[n].values())) > 1), None)
        if other is not None:
            told.append(f"{head}: collective {other} was begun at different lines")
            told += [f"  rank {rank}: {kind(rows[rank][other])} at {place}" for rank, place in places[other].items()]
    return told


def report(folder: Path) -> list[str]:
    """The whole report on a run folder, in lines."""
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
        where = f"last heard of in phase {last['phase']} of step {last['step']} at {last['place']}" if last else "?"
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
