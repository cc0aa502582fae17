"""Runs whole training steps with an engine beside the trainer; measures memory after each wake, and decoding speed.

    python benchmarks/colocated.py [--quick] [--json FILE] [--engine vllm] [--eager] [--steps N]

It is real training (`spmdrl.train.train`) on one rank: the engine sleeps at level 2 while the trainer works, and gets
new weights by a push when it wakes. On a GPU the model has Qwen2.5-0.5B's shapes with random bfloat16 weights, and vLLM
uses CUDA graphs unless `--eager` is given; on a CPU it is the tiny policy in float32. Stop tokens are ignored, so every
response has the same length. A step's row has its times, the memory that the device reports in each phase, and the
median milliseconds of the engine's steps in which all sequences ran. JSON is written when the engine has started and
after each step, so that a run that is stopped leaves what it has.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
# Remove this folder from the path, because its megatron.py would hide the package `megatron`.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks")]

from benchmarks._about import available, measured_on, save  # noqa: E402
from benchmarks._engine_steps import EngineSteps  # noqa: E402
from benchmarks._models import random_published  # noqa: E402

SIZES = {
    "cuda": dict(prompts=8, samples=8, tokens=256, steps=4),
    "cpu": dict(prompts=8, samples=4, tokens=16, steps=3),
    "cpu quick": dict(prompts=4, samples=2, tokens=8, steps=2),
}
"""Sizes by device; on a GPU `--quick` changes nothing."""
PHASES = ("idle trainer off", "engine weights on", "pushed", "rollout", "sampled", "engine asleep", "trained")
"""Phases of a step whose memory is reported, in order. `pushed` follows a wake of the weights, and `rollout` one of the
KV cache."""
GROWTH_GIB = 0.5
"""Largest growth of the memory after a wake, from the second step to the last."""
REWARD = """
from itertools import count

calls = count()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return next(calls) % 5
"""
"""A reward that differs in each group, whatever random weights sample."""


def decoding(polls: list[tuple[int, float]]) -> dict[str, float]:
    """Return the median milliseconds of the engine's steps in which most sequences ran, and numbers of both."""
    most = max(n for n, _ in polls)
    full = [1000 * seconds for n, seconds in polls if n == most]
    return {"sequences": most, "decode_ms": statistics.median(full), "engine_steps": len(polls)}


def settings(folder: Path, device: str, args: argparse.Namespace) -> list[str]:
    """Return the command line of the run."""
    flags = {
        "run.dir": folder / "run",
        "run.steps": args.steps,
        "run.device": device,
        "model.path": random_published(folder / "model", "Qwen2.5-0.5B", device) if device == "cuda" else "tiny",
        "model.dtype": "bfloat16" if device == "cuda" else "float32",
        "model.self_check": "false",
        "reward.function": folder / "reward.py",
        "rollout.engine": args.engine,
        "rollout.sleep_level": 2,
        "rollout.kv_cache_gib": 4.0 if device == "cuda" else 0.25,
        "rollout.prompts_per_step": args.prompts,
        "rollout.samples_per_prompt": args.samples,
        "rollout.max_sequences": args.prompts * args.samples,
        "rollout.max_prompt_tokens": 32,
        "rollout.max_new_tokens": args.tokens,
        "data.eval": "",
        "eval.every": 0,
        "checkpoint.at_end": "false",
        "tracking.samples": 0,
        "tracking.trackers": "jsonl",
        "tracking.console": "plain",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, *(["--rollout.enforce-eager"] if args.eager else [])]


def measure(folder: Path, device: str, args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Run the training, save and print a row for each step, print the targets, and end the process.

    folder: where the run's files go; it is deleted at the end.
    """
    import torch

    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session.open import open_run
    from spmdrl.train import JOB, train

    (folder / "reward.py").write_text(REWARD)
    config = from_command_line(settings(folder, device, args)).config
    began, rows = time.perf_counter(), []
    with open_run(JOB, Loaded(config)) as run:
        about |= {"start_s": time.perf_counter() - began, "engine": type(run.memory.engine).__name__}
        assert run.world.device.type == device, f"the run computes on {run.world.device}"
        save(args.json, about, rows=rows)
        run.memory.engine.stop = torch.zeros(0, dtype=torch.int64, device=run.world.device)
        run.memory.engine.stop_tokens = []
        timed, log = EngineSteps(run.memory.engine), run.log

        def logged(step: int, *more: Any, **named: Any) -> Any:
            out = log(step, *more, **named)
            phases = {name: run.memory.phases[name] for name in PHASES if name in run.memory.phases}
            row = {"step": step + 1, "gib": {name: border.measured / 2**30 for name, border in phases.items()}}
            line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
            kept = ("time/", "memory/", "logp_diff/", "tokens/s", "grad_norm", "response_length/mean")
            rows.append(row | decoding(timed.taken()) | {k: v for k, v in line.items() if k.startswith(kept)})
            save(args.json, about, rows=rows)
            show(rows[-1])
            return out

        run.log = logged
        train(run)
        tell(rows)
        sys.stdout.flush()
        shutil.rmtree(folder)
        # A run ends its process anyway, and vLLM's shutdown would take a while.
        os._exit(0)


def show(row: dict) -> None:
    """Print a step."""
    times = " ".join(
        f"{k[5:]} {row[k]:.3f}" for k in ("time/step", "time/rollout", "time/wake", "time/push") if k in row
    )
    memory = " ".join(f"{name}: {gib:.2f}" for name, gib in row["gib"].items())
    print(
        f"step {row['step']}: {times} s; {row['tokens/s']:.0f} tokens/s; decoding {row['decode_ms']:.2f} ms with "
        f"{row['sequences']} sequences; logp_diff {row['logp_diff/mean']:.2e}; GiB {memory}",
        flush=True,
    )


def tell(rows: list[dict]) -> None:
    """Print one line per target, and figures that have none."""
    for name in ("pushed", "rollout"):
        known = [row["gib"][name] for row in rows if name in row["gib"]]
        grown = known[-1] - known[min(1, len(known) - 1)]
        print(f"target colocated-gib-grown-{name} {grown:.3f} {GROWTH_GIB} {'ok' if grown <= GROWTH_GIB else 'miss'}")
    print(f"figure colocated-decode-ms {rows[-1]['decode_ms']:.3f}")
    print(f"figure colocated-step-s {rows[-1]['time/step']:.3f}")


def main() -> None:
    """Print a row for each step and one line per target; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="on a CPU, fewer and shorter responses")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=("auto", "vllm", "hf"), default="auto")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--steps", type=int, default=0, help="0: 4 on a GPU, 3 on a CPU (quick 2)")
    args = parser.parse_args()
    device = available()
    about = measured_on(device, args.json) | {"graphs": device == "cuda" and not args.eager}
    sizes = SIZES["cpu quick" if device == "cpu" and args.quick else device]
    vars(args).update(sizes | {"steps": args.steps or sizes["steps"]})
    about |= {name: getattr(args, name) for name in sizes}
    measure(Path(tempfile.mkdtemp(prefix="colocated_")), device, args, about)


if __name__ == "__main__":
    main()
