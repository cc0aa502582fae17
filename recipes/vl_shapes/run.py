"""A small model learns to compare shapes in drawn images: a model from SmolLM2-135M, a warm start, and GRPO.

    python recipes/vl_shapes/run.py [--seeds 0 1 2] [--ranks 1] [--out DIR]

`model.py` makes the model and `shapes.py` draws the images. The warm start (SFT) is short. In RL the reward is 1 for
the right word.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # runs from a checkout that is not installed
from recipes.stages import evaluations, run_seeds, start, trained  # noqa: E402
from recipes.vl_shapes.model import LAYERS, STEPS, make_model  # noqa: E402
from recipes.vl_shapes.shapes import dialogues, prompts, write  # noqa: E402

DIALOGUES, PROMPTS, HELD_OUT = 64 * 20, 4096, 512


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> list[list[str]]:
    """Run all stages. Return held-out accuracy before and during RL."""
    right = make_model(out / "base", seed, LAYERS, STEPS)
    print(f"the vision tower names {right:.3f} of the cells", flush=True)
    rows = write(out / "sft.parquet", dialogues(seed, DIALOGUES))
    given = ["--model.path", out / "base", "--data.train", rows, "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "sft.yaml", *given, "--run.dir", out / "sft", *sft)
    data = ["--data.train", write(out / "train.parquet", prompts("train", seed, PROMPTS))]
    data += ["--data.eval", write(out / "eval.parquet", prompts("eval", seed, HELD_OUT))]
    given = ["--model.path", trained(out / "sft"), *data, "--run.seed", seed]
    start("train", ranks, "--config", HERE / "rl.yaml", *given, "--run.dir", out / "rl", *rl)
    before, *during = evaluations(out / "rl")
    return [[before, ", ".join(during)]]


if __name__ == "__main__":
    run_seeds(__doc__, "runs/vl_shapes", 1, ("after SFT", "during RL"), one_seed)
