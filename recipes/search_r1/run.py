"""Questions about invented people, with the answers in a corpus: a small policy learns how often to search.

    python recipes/search_r1/run.py [--seeds 0 1 2] [--ranks 1] [--out DIR]

The corpus has the hut of each person and the mum of each child. The question `hut:bac=` is for the hut of bac, which
one search finds. The question `hut:mum:bac=` is for the hut of bac's mum, which needs two searches. The demonstrations
of the warm start (SFT) have a random number of searches. Many have too few, and answer with the last result or with
`?`. In RL the reward is 1 for a right answer.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import product
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
from spmdrl.data.builtin import LETTERS  # noqa: E402

WORDS = (*MARKS, "search", "query", "[", "]", "?")
CHILDREN, HELD_OUT, DEMONSTRATIONS = 450, 64, 24_000
NAMES = ["".join(letters) for letters in product(LETTERS, repeat=3)]


def make_world(seed: int) -> dict[str, dict[str, str]]:
    """Return the hut (a number) of each person and the mum of each child: {"hut": {name: hut}, "mum": {name: name}}."""
    rng = random.Random(seed)
    people = rng.sample(NAMES, 2 * CHILDREN)
    huts = {person: f"{rng.randrange(1000):03d}" for person in people}
    return {"hut": huts, "mum": dict(zip(people[::2], people[1::2], strict=True))}


def corpus(world: dict[str, dict[str, str]]) -> Iterator[dict]:
    """Yield a passage of the corpus for each fact."""
    for kind, facts in world.items():
        for about, value in facts.items():
            yield {"text": f"{kind}:{about}={value}"}


def questions(world: dict[str, dict[str, str]]) -> tuple[list[dict], list[dict]]:
    """Return rows with prompt and answer: training rows, and held-out rows about other children."""
    rows = []
    for child, mum in world["mum"].items():
        rows.append({"prompt": f"hut:{child}=", "answer": world["hut"][child]})
        rows.append({"prompt": f"hut:mum:{child}=", "answer": world["hut"][mum]})
    return rows[2 * HELD_OUT :], rows[: 2 * HELD_OUT]


def demonstrations(rows: list[dict], world: dict[str, dict[str, str]], seed: int) -> Iterator[dict]:
    """Yield dialogues about random rows, with a random number of searches up to the number that is needed."""
    rng = random.Random(seed)
    for row in rng.choices(rows, k=DEMONSTRATIONS):
        *kinds, about = row["prompt"].removesuffix("=").split(":")
        messages = [{"role": "user", "content": row["prompt"]}]
        found = ""
        for kind in reversed(kinds[rng.randint(0, len(kinds)) :]):
            query, found = f"{kind}:{about}", world[kind][about]
            messages += [calling("search", query=query), {"role": "tool", "content": f"[1] {query}={found}"}]
            about = found
        yield {"messages": [*messages, {"role": "assistant", "content": found or "?"}]}


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> list[list[str]]:
    """Run both stages. Return held-out accuracy before and during RL."""
    make_base(out / "base", seed, TEMPLATE, WORDS)
    world = make_world(seed)
    train, held_out = questions(world)
    shown = write_rows(out / "demonstrations.jsonl", demonstrations(train, world, seed))
    given = ["--model.path", out / "base", "--data.train", shown, "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "sft.yaml", *given, "--run.dir", out / "sft", *sft)
    settings = {
        "corpus": str(write_rows(out / "corpus.jsonl", corpus(world))),
        "results": 1,
        "cache": str(out / "index"),
    }
    # The chat template does not describe the tool: the policy learned its format from the demonstrations.
    env = {"environment": "builtin:search", "settings": settings, "calls": "glm", "max_turns": 4, "turn_tokens": 24}
    (out / "env.yaml").write_text(json.dumps(env))
    given = ["--model.path", trained(out / "sft"), "--env", out / "env.yaml", "--run.seed", seed]
    given += ["--data.train", write_rows(out / "train.jsonl", train)]
    given += ["--data.eval", write_rows(out / "held_out.jsonl", held_out)]
    start("train", ranks, "--config", HERE / "rl.yaml", *given, "--run.dir", out / "rl", *rl)
    before, *during = evaluations(out / "rl")
    return [[before, ", ".join(during)]]


if __name__ == "__main__":
    run_seeds(__doc__, "runs/search_r1", 1, ("after SFT", "during RL"), one_seed)
