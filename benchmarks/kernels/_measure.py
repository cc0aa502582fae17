"""Functions that the benchmarks share: timing, peak memory, alternation of contenders, tables, targets, files."""

import argparse
import ctypes
import gc
import itertools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._about import available, measured_on  # noqa: E402
from benchmarks._about import save as write  # noqa: E402

MIB = 2**20
ROUNDS = 15
MEASURED = {"mib", "rounds", "clocks", *(f"{x}{end}" for x in ("ms", "bare_ms", "ratio") for end in ("", "_range"))}
"""Keys of a row that `measure` adds. `ratio`: time divided by that of the bare work in the same round."""


@dataclass
class Job:
    """One contender at one task. `row` receives the measurements, or in `error` the reason why they are missing."""

    row: dict[str, Any]
    """Initial keys: who, kind, gives, shape."""
    run: Callable[[int], Any]
    """Makes one call; the argument i selects the inputs and may be any integer."""
    least: float
    """Smallest number of times that the bare work (a matmul or a copy) is necessary."""
    returned: int = 0
    """Bytes of the gradients that a call returns; they do not count as extra memory."""
    ready: Callable[[int], Any] = lambda i: None
    """Runs before every call, untimed."""


def measure(
    jobs: list[Job],
    device: str,
    seconds: float,
    bare: Callable[[], Any],
    keep: Callable[[list[dict]], None] = lambda rows: None,
) -> list[dict]:
    """Measure time and peak memory for one shape: the bare work and all jobs take turns in ROUNDS rounds.

    seconds: time after which no round begins; three rounds always run. bare: makes one call of the bare work. keep: is
    called with the rows after the first call of every job and after every round.
    """
    # Dynamo caches 8 graphs of a function; without a reset, most shapes would run uncompiled.
    torch.compiler.reset()
    rows, rounds, read = [job.row for job in jobs], [_Round(job) for job in jobs], clock_reader(device)
    for job in jobs:
        with _failures_in(job.row):
            for i in range(2):
                job.ready(i)
                job.run(i)
            job.ready(0)
            job.row["mib"] = peak_mib(device, partial(job.run, 0)) - job.returned / MIB
        keep(rows)
    bare()
    end = time.monotonic() + seconds
    for i in range(ROUNDS):
        if (i >= 3 and time.monotonic() > end) or all("error" in row for row in rows):
            break
        bare_ms = clock(device, bare)
        for taken in rounds:
            if "error" not in taken.job.row:
                with _failures_in(taken.job.row):
                    taken.take(i, device, bare_ms, read)
        keep(rows)
    return rows


@contextmanager
def _failures_in(row: dict[str, Any]) -> Iterator[None]:
    """Turn an exception into the row's `error`, and drop what was measured before."""
    try:
        yield
    except Exception as error:
        for name in MEASURED & row.keys():
            del row[name]
        row["error"] = reason(error)


class _Round:
    """The measurements of one job in the rounds so far."""

    def __init__(self, job: Job):
        self.job = job
        self.ms: list[float] = []
        self.bare: list[float] = []
        self.clocks: list[tuple[Any, Any]] = []

    def take(self, i: int, device: str, bare_ms: float, read: Callable[[], Any]) -> None:
        """Time one call and put medians and ranges of all calls so far into the row."""
        self.job.ready(i)
        before = read()
        self.ms.append(clock(device, partial(self.job.run, i)))
        self.clocks.append((before, read()))
        self.bare.append(bare_ms)
        least = self.job.least
        ratios = [ms / (least * bare) if bare else math.nan for ms, bare in zip(self.ms, self.bare, strict=True)]
        self.job.row["rounds"] = len(self.ms)
        for name, values in {"ms": self.ms, "bare_ms": self.bare, "ratio": ratios}.items():
            self.job.row |= {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}
        if before is not None:
            self.job.row["clocks"] = {
                when: {"sm_mhz": [x[0] for x in some], "memory_mhz": [x[1] for x in some]}
                for when, some in zip(("before", "after"), zip(*self.clocks, strict=True), strict=True)
            }


def clock_reader(device: str) -> Callable[[], tuple[int, int] | None]:
    """Return a function that reads the clocks of multiprocessors and memory in MHz; None where NVML is not installed.

    nvidia-smi would take longer than most calls; the facts of the file have its readings before and after all.
    """
    if device != "cuda":
        return lambda: None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        kinds = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        read = lambda: tuple(pynvml.nvmlDeviceGetClockInfo(gpu, kind) for kind in kinds)  # noqa: E731
        read()
        return read  # type: ignore[return-value]
    except Exception as error:
        print(f"no clocks beside the rows: {reason(error)}", flush=True)
        return lambda: None


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:160]


def clock(device: str, function: Callable[[], Any]) -> float:
    """Return the milliseconds of one call."""
    if device == "cpu":
        began = time.process_time()
        function()
        return 1e3 * (time.process_time() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def resident(name: str) -> int:
    """Return the resident memory of this process in KiB. name: VmRSS, or VmHWM for the peak."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def peak_mib(device: str, function: Callable[[], Any]) -> float:
    """Return the peak memory in MiB that one call adds, including its results; nan if the system does not report it.

    Call the function once before, because libraries load on the first call. On a CPU this is the peak of resident
    memory, which Linux resets on a write to /proc/self/clear_refs; freed memory is first returned to the system.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    except (OSError, AttributeError):
        return float("nan")
    function()
    return (resident("VmHWM") - before) / 1024


def show(rows: list[dict], sizes: str) -> None:
    """Print a table; `sizes` has one letter for each number of a shape."""
    print(
        " ".join(f"{s:>7}" for s in sizes),
        f" {'what':9} {'who':40} {'gives':6} {'ms':>9} {'x bare':>7} {'MiB':>7}",
        flush=True,
    )
    for row in rows:
        head = " ".join(f"{n:>7}" for n in row["shape"]) + f"  {row['kind']:9} {row['who']:40} {row['gives']:6}"
        tail = row.get("error") or f"{row['ms']:>9.2f} {row['ratio']:>7.3f} {row['mib']:>7.0f}"
        print(head, tail, flush=True)


def target(name: str, value: float | None, goal: float, form: str = ".2f") -> None:
    """Print whether a target is met: the value is at most the goal. A missing value or nan is a miss."""
    met = "ok" if value is not None and value <= goal else "miss"
    print(f"target {name} {'none' if value is None else format(value, form)} {goal:g} {met}", flush=True)


def worst_ratios(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return the largest ratio of our time to another contender's with the same shape, for each (kind, gives)."""
    done, out = [row for row in rows if "ms" in row], {}
    for mine, other in itertools.product(done, done):
        same = all(mine[k] == other[k] for k in ("kind", "gives", "shape"))
        if same and mine["who"].startswith("spmdrl") and not other["who"].startswith("spmdrl"):
            name = mine["kind"], mine["gives"]
            out[name] = max(out.get(name, 0.0), mine["ms"] / other["ms"])
    return out


def save(path: str | None, facts: dict, rows: list[dict]) -> None:
    """Write the results so far in one step. Called after every round, so that an interrupted run leaves its results."""
    write(path, facts, rows=rows)


def each_shape(
    shapes: list[tuple], args: argparse.Namespace, path: str | None, facts: dict, jobs_of: Any, bare_of: Any, dtype: Any
):
    """Measure shape after shape, save the rows so far in `path`, and yield each shape with its rows.

    facts: those of `facts_of` for the same path. jobs_of, bare_of: functions of shape, device and dtype.
    """
    rows: list[dict] = []
    for shape in shapes:
        keep = partial(lambda done, part: save(path, facts, done + part), list(rows))
        jobs, bare = jobs_of(shape, args.device, dtype), bare_of(shape, args.device, dtype)
        part = measure(jobs, args.device, args.seconds, bare, keep)
        del jobs, bare
        rows += part
        yield shape, part


def plot(rows: list[dict], path: str | None) -> None:
    """Plot time and memory of each kind over the shapes."""
    if not path:
        return
    try:
        import matplotlib
    except ImportError as error:
        print(f"no plot: {error}")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = plt.subplots(2, len(kinds), figsize=(16, 9), squeeze=False)
    for column, kind in enumerate(kinds):
        for axis, key, label in ((axes[0][column], "ms", "ms"), (axes[1][column], "mib", "peak MiB")):
            chosen = [r for r in rows if r["kind"] == kind and "ms" in r]
            shapes = sorted({tuple(r["shape"]) for r in chosen})
            for who in dict.fromkeys(r["who"] for r in chosen):
                values = {tuple(r["shape"]): r[key] for r in chosen if r["who"] == who}
                axis.plot([str(s) for s in shapes], [values.get(s) for s in shapes], "o-", label=who)
            axis.set(title=f"{kind}: {label}", yscale="log")
            axis.tick_params(axis="x", rotation=20, labelsize=7)
            if chosen:
                axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def options(doc: str | None, sizes: str) -> argparse.Namespace:
    """Parse the command line; add `device`, and parse `shapes` into tuples with a number for each letter of `sizes`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--shapes", nargs="+", default=[], help=f"{','.join(sizes)} each")
    parser.add_argument("--seconds", type=float, help="time for the rounds of a shape")
    args = parser.parse_args()
    args.shapes = [tuple(map(int, s.split(","))) for s in args.shapes]
    if wrong := [s for s in args.shapes if len(s) != len(sizes)]:
        parser.error(f"--shapes takes {','.join(sizes)} each, got {wrong[0]}")
    args.device = available()
    args.seconds = args.seconds or (25 if args.device == "cuda" else 5 if args.quick else 12)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    return args


def facts_of(device: str, dtype: torch.dtype, path: str | None) -> dict[str, Any]:
    """Return and print facts about the benchmark: device, machine, versions, date.

    Raises:
        SystemExit: the name of the file of results, or the environment, claims another device.
    """
    facts = measured_on(device, path) | {"dtype": str(dtype), "threads": torch.get_num_threads()}
    facts |= {"clock": "events" if device == "cuda" else "CPU seconds of the process"}
    print(facts)
    return facts
