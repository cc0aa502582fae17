"""Images in, tensors out, against transformers' own processors and models, for tiny models of every family."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from spmdrl.hub.expand import expand, image_tokens, positions
from spmdrl.hub.images import forward_inputs, load_processor, process_image
from spmdrl.hub.vision import Vision, read_vision, reads_images
from tests.unit.vision_models import (
    FAMILIES,
    TILED,
    config,
    image_processor,
    image_text,
    images,
    processor,
    processor_settings,
    tiny,
    tokenizer,
)

TEXTS = ["{0}", "look:\n{0}\n\n{0}{0} which?\n", "a {0}\n", "no image", "\n{0}b{0}", "{0}{0}{0}{0}{0}"]


def vision_of(family: str) -> Vision:
    return read_vision(config(family), tokenizer())


def ids_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def reference(family: str, text: str, pictures: list[Image.Image], made=None) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of a text and its images."""
    given = {"images": [pictures] if family in TILED else pictures} if pictures else {}
    return dict((made or processor(family))(text=[text], **given, return_tensors="pt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_images_become_the_tensors_and_ids_of_transformers_processor(family):
    vision, ours, whole = (
        vision_of(family),
        load_processor(processor_settings(family), vision_of(family)),
        processor(family),
    )
    for seed, text in enumerate(TEXTS):
        text = text.format(image_text(family))
        pictures = images(text.count(image_text(family)), seed)
        expected = reference(family, text, pictures, whole)
        payloads = [process_image(ours, picture, vision) for picture in pictures]
        got, unexpanded = expand(ids_of(text), payloads, vision), torch.tensor(ids_of(text))
        assert got.ids.tolist() == expected["input_ids"][0].tolist()
        tensors = forward_inputs(payloads, vision)
        names = {"pixel_values", "image_grid_thw", "pixel_attention_mask"} & expected.keys()
        assert tensors.keys() == names
        for name in names:
            assert tensors[name].dtype == expected[name].dtype and torch.equal(tensors[name], expected[name]), name

        inside = torch.zeros(len(got.ids), dtype=torch.bool)
        for (begin, end), payload in zip(got.spans, payloads, strict=True):
            inside[begin:end] = True
            assert got.ids[begin:end].tolist() == image_tokens(payload, vision)
            assert int((got.ids[begin:end] == vision.image).sum()) == payload.tokens
            assert got.origin[begin:end].unique().numel() == 1 and unexpanded[got.origin[begin]] == vision.image
        assert torch.equal(got.ids[~inside], unexpanded[got.origin][~inside])
        assert got.origin.unique().tolist() == list(range(len(unexpanded)))


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_a_forward_with_our_tensors_equals_that_of_transformers(family):
    model, vision = tiny(family, torch.float64), vision_of(family)
    text = "one {0} two\n{0}{0} three".format(image_text(family))
    pictures = images(3, 7)
    expected = reference(family, text, pictures)
    payloads = [process_image(image_processor(family), picture, vision) for picture in pictures]
    ids_T = expand(ids_of(text), payloads, vision).ids
    positions_T = positions(ids_T, payloads, vision)
    if vision.mrope:
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        assert torch.equal(positions_T, model.model.get_rope_index(**{n: expected[n] for n in names})[0][:, 0])
    assert positions_T.shape == ((3, len(ids_T)) if vision.mrope else (len(ids_T),))
    with torch.no_grad():
        want = model(**expected).logits
        given = forward_inputs(payloads, vision) | {"position_ids": positions_T.unsqueeze(-2)}
        got = model(input_ids=ids_T[None], **given, use_cache=False).logits
        swapped = forward_inputs([payloads[1], payloads[0], payloads[2]], vision)
        other = model(input_ids=ids_T[None], **given | {"pixel_values": swapped["pixel_values"]}).logits
    assert (got - want).abs().max() < 1e-12
    assert (other - want).abs().max() > 1e-3, "pixels arrive"


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_text_and_of_every_shape_of_image(family):
    vision, model = vision_of(family), tiny(family)
    assert torch.equal(
        positions(torch.arange(20, 29), [], vision),
        torch.arange(9).expand_as(positions(torch.arange(20, 29), [], vision)),
    )
    if not vision.mrope:
        return
    base = process_image(image_processor(family), images(1)[0], vision)
    for h, w in [(2, 2), (2, 12), (12, 2), (4, 6), (8, 8)]:
        payload = replace(base, grid=(1, h, w), tokens=h * w // 4)
        ids_T = expand([20, 4, 6, 5, 21, 22, 4, 6, 5, 6], [payload] * 3, vision).ids
        kinds, grids = (ids_T == vision.image).int(), torch.tensor([payload.grid] * 3)
        wanted, _ = model.model.get_rope_index(ids_T[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)
        assert torch.equal(positions(ids_T, [payload] * 3, vision), wanted[:, 0]), (h, w)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_name_the_parts_of_the_model(family):
    model, vision = tiny(family), vision_of(family)
    parts = dict(model.named_modules())
    assert {vision.tower, *vision.projector, vision.language, "lm_head"} <= parts.keys()
    covered = sum(
        p.numel()
        for n, p in model.named_parameters()
        if n.startswith((vision.tower, *vision.projector, vision.language, "lm_head"))
    )
    assert covered == sum(p.numel() for p in model.parameters())
    # Every module that maps features to embeddings belongs to the projector: a run that freezes the tower trains it.
    named = {name for name in parts if name.endswith(("merger", "merger_list", "connector"))}
    assert named == set(vision.projector)
    assert vision.deepstack == (family == "qwen3_vl") == any("deepstack" in name for name in parts)
    assert reads_images(config(family)) and not reads_images(config(family).get_text_config())


def test_unknown_families_and_text_models_are_refused_by_name():
    import transformers

    with pytest.raises(ValueError, match="llava are not supported.*qwen2_vl, .*smolvlm"):
        read_vision(transformers.LlavaConfig())
    with pytest.raises(ValueError, match="llama reads text only"):
        read_vision(transformers.LlamaConfig())
    wrong = config("idefics3")
    wrong.image_token_id = 10
    with pytest.raises(ValueError, match="<image> is token 9, but image_token_id in config.json is 10"):
        read_vision(wrong, tokenizer())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_an_image_is_named_by_its_content_and_the_settings(family, tmp_path):
    vision, (first, second) = vision_of(family), images(2)
    settings = processor_settings(family)
    name = process_image(load_processor(settings, vision), first, vision).name
    image_processor(family).save_pretrained(tmp_path / "flat")
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    for folder in (tmp_path / "flat", nested):
        assert process_image(load_processor(folder, vision), first.copy(), vision).name == name
    assert process_image(load_processor(settings, vision), second, vision).name != name
    changed = first.copy()
    changed.putpixel((5, 5), (0, 0, 0) if sum(first.getpixel((5, 5))) > 300 else (255, 255, 255))  # pyright: ignore
    assert process_image(load_processor(settings, vision), changed, vision).name != name
    other = load_processor(settings | {"image_mean": [0.4, 0.4, 0.4]}, vision)
    assert process_image(other, first, vision).name != name
    # Equal pixels under other settings are other content: an engine that processes the image itself might differ.
    same = load_processor(settings | {"note": 1}, vision)
    assert process_image(same, first, vision).name != name


def test_images_of_every_mode_are_processed_as_transformers_does():
    vision, made = vision_of("qwen3_vl"), image_processor("qwen3_vl")
    for mode in ("L", "P", "RGBA", "LA", "1", "CMYK", "I;16"):
        picture = images(1, 3)[0].convert("L" if mode == "I;16" else mode)
        picture = picture.convert("I").convert("I;16") if mode == "I;16" else picture
        want = made(images=[picture], return_tensors="pt")["pixel_values"]
        assert torch.equal(process_image(made, picture, vision).pixels, want), mode
    for size in ((1, 1), (3, 40), (40, 3), (1, 30)):
        want = made(images=[Image.new("RGB", size, "red")], return_tensors="pt")["pixel_values"]
        assert torch.equal(process_image(made, Image.new("RGB", size, "red"), vision).pixels, want), size


def test_an_image_that_is_one_tile_and_tiles_that_transformers_would_drop():
    vision, (picture,) = vision_of("idefics3"), images(1)
    made = load_processor(processor_settings("idefics3") | {"do_image_splitting": False}, vision)
    whole = processor("idefics3")
    whole.image_processor = made
    payload = process_image(made, picture, vision)
    assert payload.tiles == (0, 0) and payload.tokens == 4
    want = reference("idefics3", "a<image>\n", [picture], whole)["input_ids"][0]
    assert torch.equal(expand(ids_of("a<image>\n"), [payload], vision).ids, want)
    zeros = load_processor(processor_settings("idefics3") | {"image_mean": [0.0, 0.0, 0.0]}, vision)
    with pytest.raises(ValueError, match="only zeros after normalisation"):
        process_image(zeros, Image.new("RGB", (40, 40)), vision)


def test_wrong_counts_and_ids_that_are_expanded_already_are_refused():
    for family in ("qwen2_vl", "idefics3"):
        vision, pictures = vision_of(family), images(2)
        payloads = [process_image(image_processor(family), picture, vision) for picture in pictures]
        ids = ids_of(f"a{image_text(family)}b")
        with pytest.raises(ValueError, match="1 image placeholders .* and 2 images"):
            expand(ids, payloads, vision)
        with pytest.raises(ValueError, match="1 image placeholders .* and 0 images"):
            expand(ids, [], vision)
        once = expand(ids, payloads[:1], vision)
        with pytest.raises(ValueError, match="in ids that are expanded already"):
            expand(once.ids, payloads[:1], vision)
        with pytest.raises(ValueError, match=r"0 placeholders of image features, but its 1 images have \d+"):
            positions(torch.tensor([20, 21]), payloads[:1], vision)
        with pytest.raises(ValueError, match="cut sequences before an image"):
            positions(once.ids[: once.spans[0][1] - 2], payloads[:1], vision)
    with pytest.raises(ValueError, match="placeholder of a video .token 7.: give its frames as images"):
        expand([20, 4, 7, 5], [], vision_of("qwen3_vl"))
    with pytest.raises(ValueError, match="others in between"):
        positions(torch.tensor([6, 20, *[6] * (payloads_qwen().tokens - 1)]), [payloads_qwen()], vision_of("qwen2_vl"))
    with pytest.raises(ValueError, match="give it to read_vision"):
        expand([9], [payloads[0]], read_vision(config("idefics3")))
    with pytest.raises(ValueError, match="7 x 1 tiles, idefics3 has marks for 6 x 6"):
        expand([9], [replace(payloads[0], tiles=(7, 1))], vision_of("idefics3"))


def payloads_qwen():
    return process_image(image_processor("qwen2_vl"), images(1)[0], vision_of("qwen2_vl"))


def test_processors_and_images_that_do_not_fit_the_model_are_refused(tmp_path):
    vision = vision_of("qwen3_vl")
    with pytest.raises(ValueError, match="'patch_size': 14.*config.json needs.*'patch_size': 4"):
        load_processor(processor_settings("qwen3_vl") | {"patch_size": 14}, vision)
    with pytest.raises(ValueError, match="64.*config.json needs.*32"):
        load_processor(processor_settings("smolvlm") | {"max_image_size": {"longest_edge": 64}}, vision_of("smolvlm"))
    with pytest.raises(ValueError, match="no preprocessor_config.json"):
        load_processor(tmp_path, vision)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the model in"):
        load_processor(tmp_path, vision)
    with pytest.raises(ValueError, match="0 x 5 pixels"):
        process_image(image_processor("qwen3_vl"), Image.new("RGB", (0, 5)), vision)
    with pytest.raises(ValueError, match="aspect ratio"):
        process_image(image_processor("qwen3_vl"), Image.new("RGB", (1, 300)), vision)
