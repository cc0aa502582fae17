"""Writes the last collectives of a rank (its flight record) when a job fails, so that `tools/flight.py` can compare
ranks.

torch's flight recorder (enabled in `session/environ.py`) keeps each collective with its Python frames. The recorder's
last entries are written to RUN/flight/rank_00000.json. A killed rank leaves no record.
"""

import io
import json
import os
import pickle
import socket
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.health.status import is_informative, rank_status, short, stack

LAST = 50
"""Maximum number of collectives written per process group. Earlier collectives are omitted."""
POINT_TO_POINT = ("send", "recv")
sent: dict[str, int] = defaultdict(int)
"""Number of sends and receives by group name. gloo counts them as collectives, but the number differs by rank."""


class _Plain(pickle.Unpickler):
    """Unpickler that accepts only numbers, strings and containers, so that it cannot execute code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong in a flight record")


def send_and_receive(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Run torch's `batch_isend_irecv`, and count its sends and receives."""
    for operation in operations:
        sent[(operation.group or dist.group.WORLD).group_name] += 1
    return dist.batch_isend_irecv(operations) if operations else []


def collectives_of(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has started on a group."""
    count = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    # gloo's count includes sends and receives, which differ between ranks.
    return count - sent[group.group_name] if dist.get_backend(group) == "gloo" else count


def _entries(frames: bool) -> list[dict]:
    """Return the entries of torch's flight recorder, oldest first, from a pickle that this process just created."""
    dump = torch._C._distributed_c10d._dump_fr_trace(True, frames, False)  # type: ignore[attr-defined]
    return _Plain(io.BytesIO(dump)).load().get("entries", [])


def _place(frames: list[dict]) -> str:
    """Return the source line that called the collective, skipping helpers that all collectives go through."""
    for frame in frames:
        if is_informative(frame["filename"]) and not frame["filename"].startswith("<"):
            return short(frame["filename"], frame["line"])
    return short(frames[-1]["filename"], frames[-1]["line"]) if frames else "?"


def warm() -> None:
    """Import the modules that torch uses to find source lines. The import takes 1.5 s, which a failing rank may not
    have.
    """
    with suppress(Exception):
        _entries(True)


def recorded(frames: bool = True, last: int = LAST) -> dict[str, dict]:
    """Return, for each group name, its ranks, number of started collectives, and last collectives (oldest first).

    frames: True to include each collective's source line, which is `?` otherwise. last: maximum number per group.
    """
    groups: dict[str, dict] = {}
    names, members = dist.distributed_c10d._world.pg_names, dist.distributed_c10d._world.pg_group_ranks
    for group, name in names.items():
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in members.get(group, {}):
            with suppress(RuntimeError):
                ranks = sorted(members[group])
                groups[name] = {"ranks": ranks, "begun": collectives_of(group), "last": []}
    rows: dict[str, list[dict]] = defaultdict(list)
    for entry in _entries(frames):
        rows[entry["process_group"][0]].append(entry)
    for name, entries in rows.items():
        record = groups.get(name)
        if record is None:
            continue
        number = record["begun"]
        for entry in reversed(entries):
            op = entry["profiling_name"].split(":")[-1]
            if op.startswith(POINT_TO_POINT):
                continue
            if len(record["last"]) == last:
                break
            row = {"number": number, "op": op, "sizes": entry["input_sizes"], "place": _place(entry.get("frames", []))}
            record["last"].insert(0, row | {"done": bool(entry["retired"])})
            number -= 1
    return groups


def write(
    why: str, others: dict[int, dict] | None = None, error: BaseException | None = None, frames: bool = True
) -> Path | None:
    """Write this rank's record into the run folder. Returns the path, or None if writing fails. Any thread may call
    this.

    why: the last line of this rank. others: the last heartbeat of every rank, which only a few ranks have. For a killed
    rank, this heartbeat is the only trace. error: error whose stack is written, or None for the main thread's stack.
    frames: True to include each collective's source line.
    """
    folder = rank_status.folder
    if folder is None:
        return None
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    record = {
        "job": rank_status.job,
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "phase": rank_status.name,
        "step": rank_status.step,
        "why": why,
        "stack": stack(error),
        "groups": {},
        "others": others or {},
    }
    with suppress(Exception):
        record["groups"] = recorded(frames)
    path = folder / "flight" / f"rank_{rank:05d}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1))
        os.replace(part, path)
    except OSError:
        return None
    return path
