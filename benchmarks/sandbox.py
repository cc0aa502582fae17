"""Measures programs per second in the sandbox, and whether grading overlaps with the sampling of a step.

    python benchmarks/sandbox.py [--quick] [--json FILE]

*Cold*: a sandbox is opened, runs one program and is closed. *Warm*: one sandbox runs programs one after another, which
share neither processes nor files (`tests/sandbox/test_attacks.py`). The table also has `python -c` without a sandbox.
*Step*: a real job samples 64 responses from a random model with the layers of SmolLM2-135M and the tiny tokenizer
(quick: the tiny model, fewer tests), and grades each by 20 runs on standard input. Its reward always grades the same
correct program in place of the response, so that all tests run. `time/reward` is the time that the job waits for
rewards after sampling.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "sandbox")]

from benchmarks._about import measured_on, save  # noqa: E402
from benchmarks._models import TINY, random_model  # noqa: E402
from spmdrl_sandbox import bubblewrap  # noqa: E402
from spmdrl_sandbox.base import Limits, Program  # noqa: E402
from spmdrl_sandbox.warm import Warm  # noqa: E402

TRIVIAL = "print(int(input()) + 1)"
LIMITS = Limits(seconds=5.0)
COLD, WARM, WAITS = 20.0, 100.0, 0.05
"""Targets: cold programs per second and core, warm programs per second, share of a step spent waiting for rewards."""
REWARD = """
from spmdrl.config.schema import SandboxConfig
from spmdrl.rewards.base import RewardInput
from spmdrl.rewards.code import CodeGrader

grader = CodeGrader(SandboxConfig(), True)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    reward = grader(RewardInput(data_source, "print(int(input()) + 1)", ground_truth))
    assert reward.score == 1.0, reward
    return len(solution_str) % 7 / 7
"""


def per_second(run: Callable[[], None], seconds: float) -> float:
    """Call a function for some seconds and return the calls per second."""
    run()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        run()
        calls += 1
    return calls / (time.perf_counter() - began)


def plain() -> None:
    """Run the program without a sandbox."""
    done = subprocess.run([sys.executable, "-c", TRIVIAL], input=b"41", capture_output=True, check=True)
    assert done.stdout == b"42\n"


def once(warm: Warm) -> None:
    """Run the program in a sandbox."""
    ended = warm.run(Program(TRIVIAL, stdin="41"), LIMITS)
    assert (ended.verdict, ended.stdout) == ("ok", "42\n"), ended


def cold(command: list[str]) -> None:
    """Open a sandbox, run one program in it and close it."""
    warm = Warm(command)
    once(warm)
    warm.close()


def rates(seconds: float) -> dict[str, float]:
    """Return programs per second on one core, by case."""
    found = bubblewrap.find()
    assert found, "bubblewrap is missing"
    command = bubblewrap.command(found)
    os.sched_setaffinity(0, {0})
    warm = Warm(command)
    out = {
        "plain": per_second(plain, seconds),
        "cold": per_second(lambda: cold(command), seconds),
        "warm": per_second(lambda: once(warm), seconds),
    }
    warm.close()
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    return out


def step(quick: bool) -> dict[str, float]:
    """Run a job and return the times of its steps, without the first step."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = str(TINY)
        if not quick:
            # https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json
            sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
            model = str(random_model(root / "model", "Llama", 0, **sizes, num_key_value_heads=3))
        tests = 3 if quick else 20
        truth = json.dumps({"inputs": [str(i) for i in range(tests)], "outputs": [str(i + 1) for i in range(tests)]})
        (root / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}", "answer": truth}) + "\n" for i in range(64))
        )
        (root / "reward.py").write_text(REWARD)
        flags = {
            "model.path": model,
            "data.train": root / "rows.jsonl",
            "data.prompt-column": "prompt",
            "data.answer-column": "answer",
            "data.chat": "off",
            "reward.function": root / "reward.py",
            "reward.timeout": 60,
            "reward.workers": 2,
            "rollout.engine": "hf",
            "rollout.prompts-per-step": 8,
            "rollout.samples-per-prompt": 8,
            "rollout.max-new-tokens": 16 if quick else 128,
            "run.steps": 3,
            "run.dir": root / "run",
            "run.device": "cpu",
            "eval.every": 0,
            "tracking.trackers": "jsonl",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "spmdrl.train", *words, "--checkpoint.no-at-end"], cwd=ROOT, check=True)
        rows = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    names = ("time/step", "time/rollout", "time/reward")
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds of each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = measured_on("cpu", args.json)
    found = rates(1.0 if args.quick else 10.0)
    for name, rate in found.items():
        print(f"{name:8} {rate:8.1f} programs/s on one core")
    times = step(args.quick)
    waits = times["time/reward"] / times["time/step"]
    print("  ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
    for name, value, goal, holds in (
        ("cold-per-core", found["cold"], COLD, found["cold"] >= COLD),
        ("warm", found["warm"], WARM, found["warm"] >= WARM),
        ("waits-for-rewards", waits, WAITS, waits <= WAITS),
    ):
        print(f"target {name} {value:.3f} {goal} {'ok' if holds else 'miss'}")
    save(args.json, about, quick=args.quick, programs_per_second=found, step=times)


if __name__ == "__main__":
    main()
