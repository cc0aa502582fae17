"""A soak of many small steps, in which the job's processes hold no more and more: memory, open files, threads.

    python -m tests.long.test_soak [--steps N] [--ranks N] [--engine hf|vllm]     prints one JSON record for the docs

The first quarter is warm-up (caches, allocator, compiled functions). What is compared of memory are medians: of the
quarter after it, and of the last; of files and threads the least of either.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.builds import no_vllm
from tests.e2e.runner import Job, argv, metrics

LONG = 2000
GROWTH = 0.02
"""Largest growth of resident memory after the warm-up."""
SETTINGS = argv(
    "--rollout.prompts_per_step 2 --rollout.samples_per_prompt 2 --rollout.max_new_tokens 4 "
    "--rollout.max_prompt_tokens 16 --rollout.max_sequences 8 --data.limit 64 --eval.every 0 "
    "--checkpoint.every 0 --tracking.trackers jsonl --tracking.samples 1 --run.timeout 300"
)


def look(job: Job) -> dict[str, tuple[int, int, int]]:
    """Returns role and number of each living process -> bytes, open files, threads."""
    found: dict[str, tuple[int, int, int]] = {}
    for process in sorted(job.family(), key=lambda p: p.pid):
        try:
            words = process.cmdline()
            rank = process.environ().get("RANK", "-")
            role = "agent" if "--nproc-per-node" in words else f"rank {rank}"
            # Processes that a rank starts have its number too.
            number = sum(name.startswith(role) for name in found)
            found[f"{role}.{number}"] = (process.memory_info().rss, process.num_fds(), process.num_threads())
        except psutil.Error:
            continue
    return found


def soak(folder: Path, steps: int, ranks: int = 0, engine: str = "hf", limit: float = 3600, every: float = 0.5) -> dict:
    """Makes one run of so many steps, watched; returns its record."""
    seen: dict[str, list[tuple[int, tuple[int, int, int]]]] = {}
    job = Job([*SETTINGS, "--run.steps", steps, "--rollout.engine", engine, "--run.dir", folder], ranks=ranks)
    began = time.monotonic()
    try:
        while job.process.poll() is None and time.monotonic() - began < limit:
            rows = folder / "metrics.jsonl"
            done = rows.read_bytes().count(b"\n") if rows.exists() else 0
            # The last samples are left out: they show the end of the run.
            if steps // 4 <= done < steps - 2:
                for name, values in look(job).items():
                    seen.setdefault(name, []).append((done, values))
            time.sleep(every)
        ended = job.wait(30)
    finally:
        job.kill()
    assert ended.rc == 0 and not ended.left, ended.show()
    assert len(metrics(folder)) == steps
    record = {"steps": steps, "ranks": max(ranks, 1), "engine": engine, "seconds": round(ended.seconds, 1)}
    processes = {}
    for name, rows in seen.items():
        at = [step for step, _ in rows]
        # A helper that lives for a moment (a shell that asks for a version) is no leak.
        if at[-1] < steps * 0.9 or at[0] > steps * 0.5:
            continue
        early = [v for step, v in rows if step < steps / 2]
        late = [v for step, v in rows if step >= steps * 3 / 4]
        first, last = (statistics.median(v[0] for v in part) for part in (early, late))
        processes[name] = {
            "mib": round(last / 2**20, 1),
            "growth": round(last / first - 1, 5),
            "samples": len(rows),
            # The least of each: what leaks stays, and a file that is open for a moment does not count.
            "files": [min(v[1] for v in early), min(v[1] for v in late)],
            "threads": [min(v[2] for v in early), min(v[2] for v in late)],
        }
    counts = [
        len({name for name, rows in seen.items() if any(lo <= s < hi for s, _ in rows)})
        for lo, hi in (
            (steps // 4, steps // 2),
            (steps * 3 // 4, steps),
        )
    ]
    return record | {"processes": processes, "process_count": counts}


def check(record: dict) -> None:
    """Checks the promise of docs/reliability.md."""
    ranks = [name for name in record["processes"] if name.startswith("rank")]
    assert len(ranks) >= record["ranks"], record
    for name, what in record["processes"].items():
        assert what["growth"] < GROWTH, (name, record)
        assert what["files"][1] <= what["files"][0], (name, record)
        assert what["threads"][1] <= what["threads"][0], (name, record)
    assert record["process_count"][1] <= record["process_count"][0], record


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks, engine", [(0, "hf"), (2, "hf"), (2, "vllm")])
def test_soak_2000_steps(tmp_path, ranks, engine):
    if engine == "vllm" and no_vllm():
        pytest.skip(no_vllm())
    check(soak(tmp_path / "run", LONG, ranks, engine))


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--steps", type=int, default=LONG)
    words.add_argument("--ranks", type=int, default=0)
    words.add_argument("--engine", default="hf")
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps({"soak": soak(Path(place) / "run", asked.steps, asked.ranks, asked.engine)}))
