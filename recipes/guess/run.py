"""A game over turns: a small policy learns to guess a number by halving its range.

    python recipes/guess/run.py [--seeds 0 1 2] [--ranks 1] [--out DIR]

`builtin:guess` draws a number from 1 to 8 and answers each of up to four guesses with `higher` or `lower`. The warm
start (SFT) trains on games of two players that do not halve the range: one guesses at random among the numbers that are
still possible, the other ignores the answers and guesses at random among all numbers. In RL the reward is 1 for a game
that is won.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # runs from a checkout that is not installed
from recipes.stages import TEMPLATE, evaluations, make_base, run_seeds, start, trained, write_rows  # noqa: E402
from spmdrl.env.builtin import Guess  # noqa: E402

NUMBERS, GAMES = 8, 8192


def games(seed: int) -> Iterator[dict]:
    """Yield games as dialogues. In about half of them guesses are still possible numbers, in the others any numbers."""
    rng, game = random.Random(seed), Guess(NUMBERS)
    for _ in range(GAMES):
        low, high, listens = 1, NUMBERS, rng.random() < 0.5
        messages = [{"role": "user", "content": game.reset({}, rng.getrandbits(32))}]
        done = False
        while not done:
            number = rng.randint(low, high)
            guess = {"role": "assistant", "content": str(number)}
            answer, _, done = game.step(guess)
            if listens:
                low, high = (number + 1, high) if answer == "higher" else (low, number - 1)
            messages += [guess] if done else [guess, {"role": "user", "content": answer}]
        yield {"messages": messages}


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> list[list[str]]:
    """Run both stages. Return the share of held-out games that are won, before and during RL."""
    make_base(out / "base", seed, TEMPLATE)
    rows = write_rows(out / "games.jsonl", games(seed))
    given = ["--model.path", out / "base", "--data.train", rows, "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "sft.yaml", *given, "--run.dir", out / "sft", *sft)
    given = ["--model.path", trained(out / "sft"), "--run.seed", seed]
    start("train", ranks, "--config", HERE / "rl.yaml", *given, "--run.dir", out / "rl", *rl)
    before, *during = evaluations(out / "rl", "eval/score")
    return [[before, ", ".join(during)]]


if __name__ == "__main__":
    run_seeds(__doc__, "runs/guess", 1, ("after SFT", "during RL"), one_seed)
