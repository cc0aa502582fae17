"""The flight record: the last collectives of every rank, written when a job fails; `tools/flight.py` compares.

torch's own recorder notes each collective with its Python frames (switched on in `session/environ.py`); here its last
entries go to RUN/flight/rank_00000.json. A rank that was killed leaves none.
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

from spmdrl.health.status import rank_status, short, stack, telling

LAST = 50
"""Collectives that are written for each group."""
POINT_TO_POINT = ("send", "recv")
sent: dict[str, int] = defaultdict(int)
"""Sends and receives by the name of their group: gloo counts them among its collectives, and ranks differ in them."""


class _Plain(pickle.Unpickler):
    """Unpickler that reads numbers, texts and containers, and nothing that would run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into a flight record")


def send_and_receive(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Counts the sends and receives of torch's `batch_isend_irecv` and passes them on."""
    for operation in operations:
        sent[(operation.group or dist.group.WORLD).group_name] += 1
    return dist.batch_isend_irecv(operations) if operations else []


def collectives_of(group: dist.ProcessGroup) -> int:
    """Number of collectives that this rank has begun on a group."""
    count = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    # Only gloo counts both in one.
    return count - sent[group.group_name] if dist.get_backend(group) == "gloo" else count


def _entries(frames: bool) -> list[dict]:
    """Entries of torch's recorder, oldest first, read from a pickle that this process makes at this moment."""
    dump = torch._C._distributed_c10d._dump_fr_trace(True, frames, False)  # type: ignore[attr-defined]
    return _Plain(io.BytesIO(dump)).load().get("entries", [])


def _place(frames: list[dict]) -> str:
    """Line that called the collective, with helpers of this project passed over: all calls go through those."""
    for frame in frames:
        if telling(frame["filename"]) and not frame["filename"].startswith("<"):
            return short(frame["filename"], frame["line"])
    return short(frames[-1]["filename"], frames[-1]["line"]) if frames else "?"


def warm() -> None:
    """Makes torch import the modules that name frames: 1.5 s of a core, which a rank that fails may not have."""
    with suppress(Exception):
        _entries(True)


def recorded(frames: bool = True, last: int = LAST) -> dict[str, dict]:
    """Record by group name: its ranks, the number of collectives begun, and the last ones, oldest first.

    Without frames their places are `?`.
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
        told = groups.get(name)
        if told is None:
            continue
        number = told["begun"]
        for entry in reversed(entries):
            op = entry["profiling_name"].split(":")[-1]
            if op.startswith(POINT_TO_POINT):
                continue
            if len(told["last"]) == last:
                break
            row = {"number": number, "op": op, "sizes": entry["input_sizes"], "place": _place(entry.get("frames", []))}
            told["last"].insert(0, row | {"done": bool(entry["retired"])})
            number -= 1
    return groups


def write(
    why: str, others: dict[int, dict] | None = None, error: BaseException | None = None, frames: bool = True
) -> Path | None:
    """Writes this rank's record into the run folder; returns None if there is no folder or nothing can be written.

    May be called by any thread.

    Args:
        why: the last line of this rank.
        others: last heartbeat of every rank, on a few ranks; a rank that was killed leaves nothing else.
        error: error whose stack is written; None for the main thread's stack.
        frames: also write where each collective was begun.
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
