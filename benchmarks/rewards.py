"""Measures how many answers a rank grades per second, in its own process and through the pool of processes.

    python benchmarks/rewards.py [--quick] [--json FILE]

The answers are synthetic: 80 words of work and `#### n` as in GSM8K, and a sixth of them are wrong. They are submitted
in steps of 256, with a poll after each answer as in a rollout, and then drained. Each row is the best of three rounds.
The printed time per answer is 1 second divided by the rate. `auto` and `verl file`, a user's file with verl's
signature, go through the pool. `auto, symbolic` needs math-verify for each answer. It has one round of 128 answers,
since parsed answers are cached. Times are wall-clock times, so other load on the machine lowers the rates.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._about import measured_on, save  # noqa: E402

STEP = 256
TARGET = 1000.0
"""Minimum answers per second of one rank with one worker."""
USER_FILE = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)
"""
WORDS = (
    *("there", "are", "many", "apples", "in", "each", "box", "so", "we", "add", "the", "price", "of", "all", "pens"),
    *("and", "divide", "by", "days", "of", "work"),
)


def answers(count: int, source: str, symbolic: bool = False) -> list[tuple[Any, float]]:
    """Return synthetic responses, each with its expected score."""
    from spmdrl.rewards.base import RewardInput

    draw, made = random.Random(7), []
    for i in range(count):
        truth, right = draw.randrange(10_000), i % 6 != 0
        work = " ".join(draw.choice(WORDS) if draw.random() < 0.8 else str(draw.randrange(100)) for _ in range(80))
        number = truth if right else truth + 1
        # These answers differ as text and are not numbers, so only math-verify can compare them.
        end, answer = (rf"\boxed{{{number}x+{truth}}}", f"{truth}(x+1)") if symbolic else (f"#### {number}", str(truth))
        made.append((RewardInput(source, f"{work}\n{end}", answer, {"index": i, "split": "train"}), float(right)))
    return made


def rate(grader: Any, rows: list[tuple[Any, float]]) -> float:
    """Grade the rows, check every score, and return the answers per second."""
    got: list[tuple[Any, Any]] = []
    begun = time.perf_counter()
    for start in range(0, len(rows), STEP):
        for i, (item, _) in enumerate(rows[start : start + STEP], start):
            grader.submit(i, item)
            got += grader.poll()
        got += grader.drain()
    seconds = time.perf_counter() - begun
    scores = {key: reward.score for key, reward in got}
    assert scores == {i: score for i, (_, score) in enumerate(rows)}, "a score is wrong"
    return len(rows) / seconds


def main() -> None:
    """Run the measurements, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer answers, one round")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    about = measured_on("cpu", args.json)

    from spmdrl.config.schema import RewardConfig, SandboxConfig
    from spmdrl.rewards.load import load_reward

    count, rounds = (2 * STEP, 1) if args.quick else (8 * STEP, 3)
    gsm8k, few = answers(count, "openai/gsm8k"), answers(8 + 128, "numina_cn_k12", symbolic=True)
    rows: list[dict[str, Any]] = []
    about |= {"load_before": os.getloadavg()[0]}  # Load by other programs lowers the rates.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(USER_FILE)
        for name, function, workers, items in (
            ("gsm8k", "gsm8k", 0, gsm8k),
            ("auto", "auto", 1, gsm8k),
            ("auto", "auto", 2, gsm8k),
            ("verl file", str(file), 1, gsm8k),
            ("auto, symbolic", "auto", 1, few),
        ):
            settings = RewardConfig(function=function, workers=max(1, workers), timeout=60.0)
            grader = load_reward(settings, SandboxConfig())
            try:
                rate(grader, items[: 8 if items is few else STEP])  # The first call loads the rewards of the rows.
                timed = items[8:] if items is few else items
                best = max(rate(grader, timed) for _ in range(1 if items is few else rounds))
            finally:
                grader.close()
            where = f"pool of {workers}" if workers else "the rank itself"
            rows.append({"reward": name, "workers": workers, "answers": len(timed), "answers_per_second": best})
            print(f"{name:16} {where:16} {best:>10.0f} answers/s {1e6 / best:>8.0f} us", flush=True)
    pool = min(row["answers_per_second"] for row in rows if row["workers"] == 1 and row["answers"] == count)
    print(f"target pool-answers-per-second {pool:.0f} {TARGET:.0f} {'ok' if pool >= TARGET else 'miss'}")
    save(args.json, about, rows=rows)


if __name__ == "__main__":
    main()
