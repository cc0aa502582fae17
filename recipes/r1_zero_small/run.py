"""DeepSeek-R1's stages on a small scale: a base model, SFT on demonstrations, RL after SFT, and RL without SFT.

    python recipes/r1_zero_small/run.py [--seeds 0 1 2] [--ranks 2] [--out DIR]

The base model has the architecture of the shipped policy and random weights. The task is `builtin:reverse`: answer
`abcde=` with `edcba`. About half of the demonstrations are wrong (the copy `abcde`), so a model that imitates them is
right about half of the time. RL then rewards right answers. RL without SFT starts from the base model, like R1-Zero.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # runs from a checkout that is not installed
from recipes.stages import evaluations, make_base, run_seeds, start, trained  # noqa: E402
from spmdrl.data.builtin import builtin_rows  # noqa: E402

WRONG_SHARE = 0.5


def make_demonstrations(file: Path, seed: int) -> None:
    """Write the training prompts of the task with completions, of which a share is wrong."""
    rng = random.Random(seed)
    with file.open("w") as out:
        for row in builtin_rows("reverse", held_out=False):
            wrong = rng.random() < WRONG_SHARE
            completion = row["prompt"].removesuffix("=") if wrong else row["answer"]
            out.write(json.dumps({"prompt": row["prompt"], "completion": completion}) + "\n")


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> list[list[str]]:
    """Run all stages. Return held-out accuracy of the base, before and during RL after SFT, and of RL without SFT."""
    make_base(out / "base", seed)
    make_demonstrations(out / "demonstrations.jsonl", seed)
    given = ["--model.path", out / "base", "--data.train", out / "demonstrations.jsonl", "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "demo_sft.yaml", *given, "--run.dir", out / "sft", *sft)
    for name, model in (("rl", trained(out / "sft")), ("zero", out / "base")):
        given = ["--model.path", model, "--run.seed", seed]
        start("train", ranks, "--config", HERE / "demo_rl.yaml", *given, "--run.dir", out / name, *rl)
    first, *later = evaluations(out / "rl")
    alone = evaluations(out / "zero")
    return [[alone[0], first, ", ".join(later), alone[-1]]]


if __name__ == "__main__":
    columns = ("base", "after SFT", "during RL", "RL from the base")
    run_seeds(__doc__, "runs/r1_zero_small", 2, columns, one_seed)
