"""Plans of models that read images: their parameters, images that fill a prompt, and towers that engines divide."""

import json
from functools import partial

import pytest
import torch
from PIL import Image

from spmdrl.config.schema import Config
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.microbatch import microbatch_count, microbatches, units_of
from spmdrl.data.pack import from_episodes
from spmdrl.hub.images import process_image
from spmdrl.hub.vision import read_vision
from spmdrl.plan.engine_boxes import EngineLayout
from spmdrl.plan.engine_bytes import model_of
from spmdrl.plan.images import images_of, rectangle
from spmdrl.plan.run import side_by_side
from tests.unit import vision_models
from tests.unit.vision_models import FAMILIES, TILED, image_processor, tiny

PROMPT, NEW = 120, 8
CASES = [*((family, ()) for family in FAMILIES), ("qwen2_5_vl", ("vision", "projector")), ("smolvlm", ("vision",))]


def settings(folder, freeze=(), prompt=PROMPT) -> Config:
    cfg = Config()
    cfg.model.path, cfg.model.freeze, cfg.model.dtype = str(folder), freeze, "bfloat16"
    cfg.rollout.engine, cfg.rollout.prompts_per_step, cfg.rollout.samples_per_prompt = "vllm", 3, 2
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_new_tokens = prompt, NEW
    cfg.policy.max_tokens_per_microbatch = PROMPT + 2 * NEW
    return cfg


def on_paper(folder, freeze) -> dict:
    """Returns what a plan of one rank says. It needs a process of its own."""
    from spmdrl.plan.rank import open_rank

    made = open_rank(settings(folder, freeze), 0, 1, "cuda", 80 << 30)
    step = made.step((1,))
    # One micro-batch holds one prompt.
    works = {work.kind: work.passes[0].flops * work.total for work in step.works}
    out = {"held": step.held, "host": step.always, "images": made.images, "works": works}
    out |= {"numbers": (made.numbers, made.tower_numbers, step.numbers), "checkpoint": made.checkpoint()}
    return out | {"engine": made.engine.weight_bytes, "unknown": made.engine.unknown, "exchanged": step.exchanged}


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict:
    """What plans say, by family and frozen parts."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        vision_models.config(family).save_pretrained(root / family)
    tasks = [partial(on_paper, root / family, freeze) for family, freeze in CASES]
    return dict(zip(CASES, side_by_side(tasks), strict=True))


def parts(family: str) -> dict[str, list[int]]:
    """Sizes of the parameters of each part, from the modules of the real model."""
    hf, vision = tiny(family), read_vision(vision_models.config(family))
    modules = dict(hf.named_modules())
    projector = [p for name in vision.projector for p in modules[name].parameters()]
    inside = {id(p) for p in projector}
    tower = [p for p in modules[vision.tower].parameters() if id(p) not in inside]
    seen = inside | {id(p) for p in tower}
    found = {"vision": tower, "projector": projector, "language": [p for p in hf.parameters() if id(p) not in seen]}
    return {part: [p.numel() for p in ps] for part, ps in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "freeze"), CASES)
def test_parameters_and_their_state_are_those_of_the_model(plans, family, freeze):
    told, own = plans[family, freeze], parts(family)
    total, tower = sum(map(sum, own.values())), sum(own["vision"] + own["projector"])
    assert told["numbers"] == (total, tower, total)
    trained = [n for part, sizes in own.items() if part not in freeze for n in sizes]
    # AdamW has two moments of each number, and a step count of each tensor.
    assert told["held"]["policy optimizer"] == 8 * sum(trained) + 4 * len(trained)
    assert told["held"]["policy parameters"] == 4 * total
    # A checkpoint has the weights in bfloat16, and in float32 the weights and the moments.
    assert told["checkpoint"] == 6 * total + 8 * sum(trained)
    assert told["engine"] == 2 * total
    assert [name for name in told["unknown"] if "linear_attn" not in name] == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "freeze"), CASES)
def test_images_fill_prompts(plans, family, freeze):
    told, own = plans[family, freeze], parts(family)
    images, vision = told["images"], read_vision(vision_models.config(family))
    # A token of text and marks leave 116, and 8 x 14 is the most; tiles have 4 tokens and three marks.
    count, each = (17, 4) if family in TILED else (1, 112)
    assert (images.count, images.tokens) == (count, each)
    assert images.flops == 2 * count * each * (vision.merge**2 * sum(own["vision"]) + sum(own["projector"]))
    pixels = count * (3 * vision.tile**2 if vision.tile else each * 4 * 3 * 2 * vision.patch**2)
    assert images.bytes == 4 * pixels
    # Three prompts are sampled, and three are learnt from.
    assert told["host"] == {"pixels of images": 6 * images.bytes} and told["exchanged"] == 3 * images.bytes
    # Twice as many operations for gradients of the tower; the batch has three prompts.
    assert told["works"]["update"] > (1 if freeze else 3) * 3 * images.flops
    first, second = images.lines(1000, told["exchanged"])
    shown = f"17 tiles of {vision.tile} x {vision.tile}" if vision.tile else "1 image of 112 x 64"
    assert f"each prompt shows {shown} pixels, {count * each} tokens from {count * each * vision.merge**2} pat" in first
    assert f"{vision.merge**2} patches for each token" in second and f"so {vision.merge**2 * 1000:,};" in second


@pytest.mark.slow
def test_a_frozen_tower_takes_fewer_operations(plans):
    assert plans["qwen2_5_vl", ()]["works"]["update"] > plans["qwen2_5_vl", CASES[-2][1]]["works"]["update"]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_those_of_the_processor(family, tmp_path):
    """An image of the size in the report becomes the tokens and pixels of the plan."""
    config, vision = vision_models.config(family), read_vision(vision_models.config(family))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(vision_models.processor_settings(family)))
    images = images_of(settings(tmp_path), config, tmp_path, {"vision": 0, "projector": 0})
    assert images is not None
    height, width = [n * vision.patch for n in images.grid[1:]] if images.grid else [2 * (vision.tile or 0)] * 2
    made = process_image(image_processor(family), Image.new("RGB", (width, height), "red"), vision)
    if vision.tile:
        assert made.pixels.shape[1:] == images.shape[1:] and made.tokens == len(made.pixels) * images.tokens
    else:
        # The processor allows 30 tokens.
        assert (made.grid, made.tokens, tuple(made.pixels.shape)) == (images.grid, images.tokens, images.shape)
        assert images.count == 4 and images.tokens <= 30
    tokens, shown = images.prompt(0, [300] * PROMPT)
    assert len(tokens) == PROMPT and tokens.count(vision.image) == images.count * images.tokens
    assert all(tokens[at] == vision.image != tokens[at - 1] for at, _ in shown)


def test_prompts_too_short_for_an_image_show_none(tmp_path):
    for family in FAMILIES:
        config = vision_models.config(family)
        assert images_of(settings(tmp_path, prompt=4), config, tmp_path, {"vision": 0, "projector": 0}) is None


def test_rectangles_have_most_of_the_tokens():
    for tokens in range(1, 2000):
        height, width = rectangle(tokens)
        assert tokens - tokens**0.5 / 2 <= height * width <= tokens
        assert height <= width <= 3 * height or tokens < 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_ranks_of_an_engine_divide_the_tower(family, kind):
    config = vision_models.config(family)
    layout, divided = EngineLayout(kind, config, 2), 0
    for entry in model_of(config).entries:
        if layout.tower not in entry.name.split(".") and "modality_projection" not in entry.name:
            continue
        times = torch.zeros(entry.shape, dtype=torch.int64)
        for place in range(2):
            cut = layout.cut(entry.name, entry.shape, place)
            assert cut.group != "unknown", entry.name
            for box in cut.boxes:
                times[tuple(slice(a, b) for a, b in box)] += 1
        assert times.min() == times.max() and times.min() in (1, 2), entry.name
        divided += int(times.min() == 1)
    assert divided > 10


# ── micro-batches ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("share", [False, True])
def test_a_micro_batch_bounds_patches(family, share):
    """Its patches are at most those of the tokens that it computes, with images that several sequences show."""
    vision = read_vision(vision_models.config(family))
    payloads = [process_image(image_processor(family), image, vision) for image in vision_models.images(5)]
    episodes = []
    for position in range(6):
        # Prompts share images with one another; some show one image twice.
        shown = [payloads[(position + i) % 5] for i in (0, 1, 0)[: 1 + position % 3]]
        tokens, images = [20 + position], []
        for payload in shown:
            images.append((len(tokens), payload))
            tokens += [vision.image] * payload.tokens + [21]
        for sample in range(3):
            made = Episode(position, sample, position, [prompt_segment(tokens, tuple(images))], "length")
            made.add_sampled([22 + sample] * 4, [-1.0] * 4, 0)
            episodes.append(made)
    batch = from_episodes(episodes, placeholder=vision.image)
    budget, most = int(batch.lengths.max()) + 8, 0
    units = units_of(batch, budget, share)
    count = microbatch_count(torch.tensor([unit.tokens for unit in units]), budget)
    for micro in microbatches(batch, count, budget, units):
        distinct = {image.name: image for row in micro.images or () for image in row}.values()
        per_tile = (vision.tile // vision.patch) ** 2 if vision.tile else 1
        patches = sum(len(image.pixels) * per_tile for image in distinct)
        assert patches <= vision.merge**2 * budget
        most = max(most, patches)
    assert most > vision.merge**2 * budget / 2, "images take most of a micro-batch here"
