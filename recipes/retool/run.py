"""Products of two numbers, which a small policy cannot compute itself: it learns to call a calculator.

    python recipes/retool/run.py [--seeds 0 1 2] [--ranks 1] [--out DIR]

The warm start (SFT) has both kinds of demonstrations: about half call the tool and repeat its answer, the others
answer directly. RL then continues from this policy twice, with and without the tool, with the same settings and number
of steps. The reward is 1 for a right answer.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # runs from a checkout that is not installed
from recipes.stages import (  # noqa: E402
    MARKS,
    TEMPLATE,
    calling,
    evaluations,
    make_base,
    run_seeds,
    start,
    trained,
    write_rows,
)

WORDS = (*MARKS, "calculate", "expression")
LOW, HIGH, HELD_OUT = 10, 100, 256


def products(seed: int) -> tuple[list[dict], list[dict]]:
    """Return rows with the prompt and answer of all products in a random order: training rows and held-out rows."""
    pairs = [(a, b) for a in range(LOW, HIGH) for b in range(LOW, HIGH)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def demonstrations(rows: list[dict], seed: int) -> Iterator[dict]:
    """Yield a dialogue for each row, with or without a call of the tool."""
    rng = random.Random(seed)
    for row in rows:
        question, answer = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}
        call = calling("calculate", expression=row["prompt"].removesuffix("="))
        result = {"role": "tool", "content": row["answer"]}
        yield {"messages": [question, call, result, answer] if rng.random() < 0.5 else [question, answer]}


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> list[list[str]]:
    """Run all stages. Return held-out accuracy before and during RL: a row with the tool, and a row without."""
    make_base(out / "base", seed, TEMPLATE, WORDS)
    train, held_out = products(seed)
    shown = write_rows(out / "demonstrations.jsonl", demonstrations(train, seed))
    given = ["--model.path", out / "base", "--data.train", shown, "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "sft.yaml", *given, "--run.dir", out / "sft", *sft)
    data = ["--data.train", write_rows(out / "train.jsonl", train)]
    data += ["--data.eval", write_rows(out / "held_out.jsonl", held_out)]
    given = ["--config", HERE / "rl.yaml", "--model.path", trained(out / "sft"), *data, "--run.seed", seed]
    rows = []
    # The chat template does not describe the tool: the policy learned its format from the demonstrations.
    (out / "env.yaml").write_text(json.dumps({"environment": "builtin:calculator", "calls": "glm"}))
    for tool, env in (("calculator", ["--env", out / "env.yaml"]), ("none", [])):
        start("train", ranks, *given, "--run.dir", out / tool, *rl, *env)
        before, *during = evaluations(out / tool)
        rows.append([tool, before, ", ".join(during)])
    return rows


if __name__ == "__main__":
    run_seeds(__doc__, "runs/retool", 1, ("tool", "after SFT", "during RL"), one_seed)
