"""Finds how long a GPU works during a step, from a trace of torch's profiler, which is not kept."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the events in a trace during which the device works."""
KINDS = {"attention": r"flash|fmha|mha_|_attn", "product": r"gemm|nvjet|cutlass|xmma|cublas|splitk"}
"""Kind of work -> pattern in the name of its kernels. Copies are `copy`, and all other work is `other`."""


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each given by its begin and end."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def work_of(trace: dict) -> dict:
    """Return the device's work in a Chrome trace, whose times are microseconds.

    `device_s`: seconds in which at least one kernel or copy ran, on any stream; `launches`: the number of both;
    `kinds`: the seconds of each kind of work. Seconds of kinds count twice where two streams work at once.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in WORK]
    kinds = dict.fromkeys([*KINDS, "copy", "other"], 0.0)
    for event in events:
        name = event["name"].lower()
        found = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        kinds["copy" if event["cat"] != "kernel" else found] += event["dur"] / 1e6
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events]
    return {"device_s": covered(spans) / 1e6, "launches": len(events), "kinds": kinds}


def traced(step: Callable[[], object]) -> dict:
    """Run a step on a GPU under the profiler; return its `work_of`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # The host is not recorded, because this would slow it down, and its times are not read.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        recorded.export_chrome_trace(str(file))
        return work_of(json.loads(file.read_text()))
