"""Plots learning curves of finished runs, and writes a small JSON lines file for each run, for docs/results.

python benchmarks/curves.py --out docs/results/smollm2_addition runs/seed0 runs/seed1 runs/seed2
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks._about import machine, versions  # noqa: E402

KEPT = (
    "step",
    "reward/mean",
    "eval/accuracy",
    "entropy/mean",
    "logp_diff/mean",
    "grad_norm",
    "tokens/s",
    "time/step",
    "time/rollout",
    "time/update",
    "time/push",
    "time/eval",
    "time/outside_model",
)


def read(run: Path) -> list[dict]:
    """Return selected columns of a run's metrics.jsonl, and the cumulative seconds of training."""
    rows, clock = [], 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        clock += row["time/step"] - row.get("time/eval", 0.0)
        rows.append({k: round(row[k], 6) for k in KEPT if k in row} | {"training_s": round(clock, 2)})
    return rows


def summary(name: str, rows: list[dict]) -> dict:
    """Return a run's first and last accuracy, when it first reached 0.9, and the share of time outside of compute."""
    evals = [(r["step"], r["training_s"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]
    reached = next(((s, t) for s, t, a in evals if a >= 0.9), (None, None))
    whole = sum(r["time/step"] for r in rows[1:])
    return {
        "run": name,
        "steps": rows[-1]["step"],
        "eval_first": evals[0][2],
        "eval_last": evals[-1][2],
        "step_at_0.9": reached[0],
        "training_s_at_0.9": reached[1],
        "training_s": rows[-1]["training_s"],
        "outside_model_share": round(sum(r["time/outside_model"] for r in rows[1:]) / whole, 4),
    }


def main() -> None:
    """Write <out>/<run>.jsonl, <out>/summary.json and <out>/curves.png; print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    summaries = []
    for i, run in enumerate(args.runs):
        rows = read(run)
        (args.out / f"{run.name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        summaries.append(summary(run.name, rows))
        color = f"C{i}"
        axes.plot([r["step"] for r in rows], [r["reward/mean"] for r in rows], color=color, alpha=0.35, lw=1)
        evals = [r for r in rows if "eval/accuracy" in r]
        axes.plot([r["step"] for r in evals], [r["eval/accuracy"] for r in evals], "o-", color=color, label=run.name)
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02), title=args.title)
    axes.grid(alpha=0.3)
    axes.legend(title="held out (line: training reward)", fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out / "curves.png", dpi=110)
    # The runs may come from another machine.
    about = {"summarized_on": machine(), "date": time.strftime("%Y-%m-%d"), **versions()}
    (args.out / "summary.json").write_text(json.dumps({"about": about, "runs": summaries}, indent=1) + "\n")
    for row in summaries:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
