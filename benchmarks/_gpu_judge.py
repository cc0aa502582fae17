"""Judges a run of a stage by the metrics and logs in its folder. It uses the standard library only."""

import json
import math
import re
from pathlib import Path

FLOAT32 = 1e-4
"""Largest |logp of engine - logp of trainer| of a token in float32 on a CPU, as in tests/engines."""
GROWTH = 0.5
"""GiB by which memory without an owner may grow from the second step to the last."""
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
    """Judges one run: (problems, figures).

    samplers: ranks that have an engine. device: `cpu` or `cuda`. limit: of the mean |difference| of a step in bfloat16,
    which holds on GPUs; on a CPU, in float32, `FLOAT32` holds for every token.
    """
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if [row.get("step") for row in rows] != list(range(1, steps + 1)):
        return [f"metrics.jsonl has steps {[row.get('step') for row in rows]}, not 1 to {steps}"], {}
    wrong = []
    name, most = ("logp_diff/max", FLOAT32) if device == "cpu" else ("logp_diff/mean", limit)
    for row in rows:
        value = row.get(name)
        if value is None or not value <= most:
            wrong.append(f"step {row['step']}: {name} is {value}, not below {most:g}")
    if not any(row.get("grad_norm", 0.0) > 0 for row in rows[:-1]):
        wrong.append("no gradient: no weights changed, so what engines hold proves nothing")
    if not all(math.isfinite(row.get("loss", math.nan)) for row in rows):
        wrong.append("a loss is missing or not finite")
    wrong += engines_placed(folder, samplers, engine, device)
    figures = {key: rows[-1][key] for key in SHOWN if key in rows[-1]}
    if "logp_diff/mean" in rows[1]:
        figures["logp_diff/mean after the second wake"] = rows[1]["logp_diff/mean"]
    figures |= {key: rows[-1][key] for key in rows[-1] if key.startswith("memory/")}
    loose = [row.get("memory/unaccounted_gib") for row in rows]
    if device == "cuda":
        if None in loose:
            wrong.append("memory/unaccounted_gib is not in every step")
        elif loose[-1] - loose[1] > GROWTH:
            wrong.append(f"memory that nobody accounts for grew from {loose[1]:.2f} to {loose[-1]:.2f} GiB")
    return wrong, figures


def engines_placed(folder: Path, samplers: list[int], engine: str, device: str) -> list[str]:
    """Lines missing in the log of each rank with an engine: vLLM on its own device, pushes checked where they end."""
    wrong = []
    for rank in samplers:
        file = folder / "logs" / f"rank_{rank}.log"
        log = file.read_text() if file.is_file() else ""
        own = "cpu" if device == "cpu" else f"cuda:{rank}"
        if engine == "vllm" and not re.search(rf"vllm: [1-9]\d* parameters and KV caches, all on {own}$", log, re.M):
            wrong.append(f"rank {rank} does not say that its engine is on {own}")
        if "after a push the engine's own memory is summed" not in log:
            wrong.append(f"rank {rank} does not say that its engine's memory is summed after a push")
    return wrong
