"""SFT on images as a user starts it: a random model learns the colours of drawings, the same on one rank and on two."""

import json

import pytest
from PIL import Image

from tests.e2e.runner import argv, metrics
from tests.e2e.warm import succeed
from tests.unit import vision_models as tiny

pytestmark = pytest.mark.timeout(240)
COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}


def drawings(folder):
    """Write rows that ask for the colour of a drawing, of unlike sizes, and some rows without images."""
    rows = []
    for number in range(40):
        colour = list(COLOURS)[number * 7 % 5 % 2]
        Image.new("RGB", (20 + number % 3 * 12, 24 + number % 4 * 8), COLOURS[colour]).save(folder / f"{number}.png")
        user = {"role": "user", "content": "<image>which?"}
        row = {"messages": [user, {"role": "assistant", "content": colour}], "images": [f"{number}.png"]}
        if number % 5 == 4:
            row = {"messages": [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]}
        rows.append(row)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_sft_on_images_learns_and_does_not_depend_on_the_number_of_ranks(family, tmp_path):
    model, rows = tiny.saved(family, tmp_path / "model"), drawings(tmp_path)
    flags = argv(
        f"--model.path {model} --model.dtype float32 --data.train {rows} --data.eval {rows} --data.rows-per-step 10 "
        "--run.steps 12 --optimizer.lr 5e-3 --eval.every 12 --tracking.trackers jsonl --data.images-column images"
    )
    found = {}
    for ranks in (1, 2):
        succeed([*flags, "--run.dir", str(tmp_path / f"run{ranks}")], module="spmdrl.sft", ranks=ranks)
        found[ranks] = metrics(tmp_path / f"run{ranks}")
    for one, two in zip(found[1], found[2], strict=True):
        for name in ("loss", "grad_norm"):
            assert one.get(name) == pytest.approx(two.get(name), rel=2e-4), (name, one, two)
    losses = [row["eval/loss"] for row in found[1] if "eval/loss" in row]
    assert losses[-1] < 0.3 * losses[0], losses
