"""Builds the sides of `mfu.py` and measures them in turns. A side that fails does not stop the others."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import isfinite
from typing import Any

import torch

from benchmarks._about import clocks
from benchmarks._mfu_sides import Ours, Plain
from benchmarks._trace import traced

PACKAGES = {"megatron": "megatron", "liger": "liger_kernel"}
"""Side -> the module that it needs."""
LIMITS = {"cpu": 1e-5, "cuda": 2e-2}
"""Maximum relative difference of a loss from the median of all losses, in float32 on a CPU and bfloat16 on a GPU."""
MEASURED = {"seconds", "tokens_per_s", "flops_per_s", "mfu", "mfu_maker", "ratio"}
"""Figures that a row with an `error` does not have."""


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(action: Callable, device: torch.device) -> float:
    """Return the seconds of an action, including its work on the device."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    synchronize(device)
    began = clock()
    action()
    synchronize(device)
    return clock() - began


@contextmanager
def failures_in(row: dict[str, Any]) -> Iterator[None]:
    """Turn an exception into the row's `error`, and drop the row's figures."""
    try:
        yield
    except Exception as error:
        for name in MEASURED & row.keys():
            del row[name]
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        if isinstance(error, torch.OutOfMemoryError):
            row["error"] = "out of memory; try --tokens-per-microbatch or --recompute"
    if "error" in row:
        gc.collect()
        # After some errors of a device, every call of it fails.
        with suppress(Exception):
            torch.cuda.empty_cache()


def build(name: str, args: tuple) -> Any:
    """Return a side by its name, the reason (a str) why it fails, or None if its package is missing."""
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        print(f"{name}: {PACKAGES[name]} is not installed")
        return None
    row: dict[str, Any] = {}
    with failures_in(row):
        return Plain(*args) if name == "plain" else Ours(name, *args)
    return row["error"]


def measure(
    sides: dict[str, Any],
    tokens: list[torch.Tensor],
    times: int,
    device: torch.device,
    losses: list[float],
    keep: Callable[[list[dict]], None],
) -> list[dict]:
    """Run all sides in turns; return a row for each, with median seconds and peak memory, or with an `error`.

    sides: results of `build`. losses: losses that other sides have on the same tokens. keep: function that is called
    with the rows after each round. A GPU's work is traced in the end, for sequences of equal length only.
    """
    steps, rows = {}, []
    for name, side in sides.items():
        if side is None:
            continue
        row: dict[str, Any] = {"side": name, "seconds_all": [], "busy": None}
        rows.append(row)
        if isinstance(side, str):
            row["error"] = side
            continue
        with failures_in(row):
            steps[name] = side.prepare(tokens)
            row |= first(steps[name], device)
    check_losses(rows, losses, LIMITS[device.type])
    keep(rows)
    for _ in range(times):
        for row in rows:
            if "error" not in row:
                with failures_in(row):
                    row["seconds_all"].append(seconds(steps[row["side"]], device))
                    row["seconds"] = statistics.median(row["seconds_all"])
        keep(rows)
    if device.type == "cuda" and len({len(x) for x in tokens}) == 1:
        for row in rows:
            if "error" not in row:
                # The figures stay if only the trace fails.
                failed: dict[str, Any] = {}
                with failures_in(failed):
                    row |= traced(steps[row["side"]]) | {"clocks": clocks()}
                    row["busy"] = row["device_s"] / row["seconds"]
                row |= {"trace_error": failed["error"]} if failed else {}
                keep(rows)
    return rows


def first(step: Callable[[], float], device: torch.device) -> dict[str, float]:
    """Run a step for the first time; return its loss and the memory that it needs."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    loss = step()
    synchronize(device)
    taken = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return {"loss": loss, "step_gib": taken / 2**30}


def check_losses(rows: list[dict], losses: list[float], limit: float) -> None:
    """Give an `error` to each row whose loss is not finite, or differs by more than `limit` from the median.

    losses: losses that count too. limit: relative to the median.
    """
    known = [row for row in rows if "error" not in row]
    finite = [x for x in (*losses, *(row["loss"] for row in known)) if isfinite(x)]
    middle = statistics.median(finite) if finite else 0.0
    for row in known:
        if not abs(row["loss"] - middle) <= limit * abs(middle):
            row["error"] = f"its loss is {row['loss']:.6g}, and that of the sides in the middle {middle:.6g}"
