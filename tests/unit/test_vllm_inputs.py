"""Images of prompts as vLLM gets them: their places among expanded ids, and the sizes that it prepares for."""

import re

import pytest
from PIL import Image

from spmdrl.engines.build import tower_problem
from spmdrl.engines.engine import check_placeholders
from spmdrl.engines.vllm.images import places_of, plain_prompt
from spmdrl.hub.expand import expand
from spmdrl.hub.images import most_tokens, process_image
from tests.unit import vision_models
from tests.unit.vision_models import FAMILIES, TILED
from tests.unit.vision_packs import facts


@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_those_where_images_were_expanded(family):
    vision, images = facts(family)
    text = vision_models.image_text(family).join(["a", "b", "", "c"])
    ids = vision_models.tokenizer()(text, add_special_tokens=False)["input_ids"]
    made = expand(ids, images, vision)
    tokens = made.ids.tolist()
    places = places_of(tokens, images, vision)
    for (at, mask), (begin, end), image in zip(places, made.spans, images, strict=True):
        assert begin <= at and at + len(mask) <= end and sum(mask) == image.tokens
        assert [token == vision.image for token in tokens[begin:end]] == (
            [False] * (at - begin) + mask + [False] * (end - at - len(mask))
        )
    if vision.video is not None:
        with pytest.raises(ValueError, match=re.escape(f"a video (token {vision.video})")):
            check_placeholders("a prompt", [*tokens, vision.video], tuple(images), vision)
        broken = [*tokens[: places[0][0] + 1], 99, *tokens[places[0][0] + 1 :]]
        with pytest.raises(ValueError, match="have others between"):
            places_of(broken, images, vision)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_has_more_features_than_vllm_prepares_for(family):
    vision, _ = facts(family)
    processor = vision_models.image_processor(family)
    most, found = most_tokens(processor, vision), []
    for sides in [(9, 9), (64, 64), (500, 400), (33, 2000), (1600, 8), (1200, 1199)]:
        found.append(process_image(processor, Image.new("RGB", sides, (90, 30, 200)), vision).tokens)
    assert max(found) <= most, (found, most)
    if family in TILED:
        assert max(found) == most, "the bound is no larger than it must be"
        processor.do_image_splitting = False
        assert most_tokens(processor, vision) == vision.tile_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 20, 35])
def test_the_image_to_measure_with_has_the_form_of_processed_ones(family, tokens):
    vision, images = facts(family)
    ids, image = plain_prompt(tokens, vision)
    assert len(ids) == image.tokens and (image.tokens <= tokens or image.tokens == (vision.tile and vision.tile_tokens))
    assert image.tokens > tokens / 2
    assert image.pixels.shape[1:] == images[0].pixels.shape[1:]
    per_row = vision.merge**2 if vision.tile is None else 1 / vision.tile_tokens
    assert len(image.pixels) == image.tokens * per_row
    assert places_of(ids, [image], vision) == [(0, [True] * len(ids))]


def test_ranks_that_cannot_share_a_tower_are_named():
    config = vision_models.config("qwen2_5_vl")
    config.vision_config.num_heads, config.vision_config.intermediate_size = 16, 3420
    assert tower_problem(config, "vllm", 4) == tower_problem(config, "hf", 8) == ""
    assert tower_problem(config, "vllm", 8, "Qwen").startswith("--rollout.tp 8: the vision tower of Qwen has 16 heads")
    assert tower_problem(config, "vllm", 8).endswith("vllm takes 1, 2, 4")
    assert tower_problem(vision_models.config("smolvlm"), "vllm", 3)
    assert tower_problem(vision_models.config("qwen2_vl"), "vllm", 2) == ""
