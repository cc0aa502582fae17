"""Checks the metrics and logs in the run folder of a stage. It only needs the standard library."""

import json
import math
import re
from pathlib import Path

FLOAT32 = 1e-4
"""Maximum |logp of engine - logp of trainer| of a token in float32 on a CPU, as in tests/engines."""
GROWTH = 0.5
"""Maximum growth in GiB of memory without a known owner, from the second step to the last."""
SHOWN = (
    "logp_diff/mean",
    "logp_diff/max",
    "grad_norm",
    "reward/mean",
    "time/step",
    "time/push",
    "time/wake",
    "tokens/s",
)


def judge(
    folder: Path, steps: int, samplers: list[int], engine: str, device: str, limit: float
) -> tuple[list[str], dict[str, float]]:
    """Check one run; return its problems and its figures.

    samplers: ranks with an engine. device: `cpu` or `cuda`. limit: maximum of a step's mean |logp of engine - logp of
    trainer| on GPUs, in bfloat16. On a CPU, in float32, the limit is `FLOAT32` for every token.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # A run that was killed may leave half a line.
    if [row.get("step") for row in rows] != list(range(1, steps + 1)):
        # The figures of a run that was stopped are kept.
        return [f"metrics.jsonl has steps {[row.get('step') for row in rows]}, not 1 to {steps}"], figures_of(rows)
    wrong = []
    name, most = ("logp_diff/max", FLOAT32) if device == "cpu" else ("logp_diff/mean", limit)
    for row in rows:
        value = row.get(name)
        if value is None or not value <= most:
            wrong.append(f"step {row['step']}: {name} is {value}, not below {most:g}")
    if not any(row.get("grad_norm", 0.0) > 0 for row in rows[:-1]):
        wrong.append("no gradient: weights did not change, so the run proves nothing about pushes")
    if not all(math.isfinite(row.get("loss", math.nan)) for row in rows):
        wrong.append("a loss is missing or not finite")
    wrong += engines_placed(folder, samplers, engine, device)
    loose = [row.get("memory/unaccounted_gib") for row in rows]
    if device == "cuda":
        if None in loose:
            wrong.append("memory/unaccounted_gib is not in every step")
        elif loose[-1] - loose[1] > GROWTH:
            wrong.append(f"memory without a known owner grew from {loose[1]:.2f} to {loose[-1]:.2f} GiB")
    return wrong, figures_of(rows)


def figures_of(rows: list[dict]) -> dict[str, float]:
    """Return figures of the last step, and the mean difference in logp after the second wake."""
    if not rows:
        return {}
    figures = {key: rows[-1][key] for key in SHOWN if key in rows[-1]}
    if len(rows) > 1 and "logp_diff/mean" in rows[1]:
        figures["logp_diff/mean after the second wake"] = rows[1]["logp_diff/mean"]
    return figures | {key: rows[-1][key] for key in rows[-1] if key.startswith("memory/")}


def engines_placed(folder: Path, samplers: list[int], engine: str, device: str) -> list[str]:
    """Return a problem for each line that the log of a rank with an engine lacks.

    The lines are about the device of vLLM and about the checksums after a push.
    """
    wrong = []
    for rank in samplers:
        file = folder / "logs" / f"rank_{rank}.log"
        log = file.read_text() if file.is_file() else ""
        own = "cpu" if device == "cpu" else f"cuda:{rank}"
        if engine == "vllm" and not re.search(rf"vllm: [1-9]\d* parameters and KV caches, all on {own}$", log, re.M):
            wrong.append(f"the log of rank {rank} has no line that its engine is on {own}")
        if "after a push the engine's own memory is summed" not in log:
            wrong.append(f"the log of rank {rank} has no line about checksums of its engine's memory after a push")
    return wrong
