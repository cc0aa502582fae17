"""Rows with images for SFT: tokens and masks equal transformers' own processor's, and bad rows are refused by name."""

import io
import json
from pathlib import Path

import pytest
import torch

from spmdrl.config.preference import PreferenceConfig
from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.config.sft import SFTConfig
from spmdrl.data.row_columns import Row, RowError
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.hub.vision import read_vision
from spmdrl.session.image_reader import ImageReader, check_same_images, image_reader
from spmdrl.spmd.payload import Payload
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.pair_encoder import PairEncoder, pack_pair_sides
from spmdrl.supervised.preview import shown
from spmdrl.supervised.rows import pack
from spmdrl.supervised.steps import StepEncoder
from tests.unit import vision_models as tiny


def encoder(family: str, folder: Path, max_tokens: int = 2048) -> Encoder:
    tokenizer = tiny.chat_tokenizer(family)
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny.processor_settings(family)))
    vision = read_vision(tiny.config(family), tokenizer)
    reader = ImageReader(folder, vision, tokenizer.convert_ids_to_tokens(vision.image))
    return Encoder(SFTConfig().data, tokenizer, max_tokens, "assistant", reader)


def turn(text, role="user") -> dict:
    return {"role": role, "content": text}


def parts(*contents: str) -> list[dict]:
    return [{"type": "image"} if each == "image" else {"type": "text", "text": each} for each in contents]


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_tokens_and_mask_are_those_of_the_processor_in_every_form_of_a_row(family, tmp_path):
    encode, (a, b) = encoder(family, tmp_path), tiny.images(2)
    a.save(tmp_path / "a.png")
    answer, second = turn("small", "assistant"), turn("large", "assistant")
    rows = {
        "verl": {"messages": [turn("<image>what?"), answer, turn("and<image>"), second]},
        "trl": {"messages": [turn(parts("image", "what?")), answer, turn(parts("and", "image")), second]},
    }
    rows = {name: row | {"images": [{"path": "a.png"}, {"bytes": png(b)}]} for name, row in rows.items()}
    held = [{"type": "image", "image": a}, {"type": "text", "text": "what?"}]
    rows["in parts"] = {"messages": [turn(held), answer, turn(["and", b]), second]}
    rows["in parts"]["messages"][2]["content"] = [{"type": "text", "text": "and"}, {"type": "image", "image": b}]
    found = {name: encode(Row(row, str(tmp_path))).sequences for name, row in rows.items()}
    dialogue = [turn(parts("image", "what?")), answer, turn(parts("and", "image")), second]
    text = encode.tokenizer.apply_chat_template(dialogue, tokenize=False)
    want = tiny.processor(family)(text=[text], images=[[a, b]], return_tensors="pt")
    for name, (sequence,) in found.items():
        assert torch.equal(sequence.tokens, want["input_ids"][0][: len(sequence)]), name
        trained = encode.tokenizer.decode(sequence.tokens[sequence.mask])
        assert trained == "small<|im_end|>large<|im_end|>", name
        pixels = torch.cat([payload.pixels for payload, *_ in sequence.images])
        assert torch.equal(pixels, want["pixel_values"].flatten(0, 1) if pixels.dim() == 4 else want["pixel_values"])
    (one,), (two,) = found["verl"], found["trl"]
    assert all(x[0] is y[0] for x, y in zip(one.images, two.images, strict=True)), "processed once"


def test_truncation_ends_before_an_image_and_packs_hold_images_of_whole_sequences(tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    messages = [turn("<image>"), turn("yes", "assistant"), turn("or<image>this"), turn("no", "assistant")]
    row = Row({"messages": messages, "images": tiny.images(2)})
    (sequence,) = encode(row).sequences
    (_, begin, end), placeholder = sequence.images[1], encode.images.vision.image
    for longest, count in ((end, 2), (end - 1, 1), (begin + 1, 1), (begin, 1)):
        encode.longest = longest
        (cut,) = encode(row).sequences
        assert len(cut) == (end if count == 2 else begin) and len(cut.images) == count
        text = Row({"messages": [turn("plain"), turn("text", "assistant")]})
        batch = pack([(0, 0, cut), (1, 0, *encode(text).sequences)], placeholder=placeholder)
        assert [len(each) for each in batch.images] == [count, 0]
    encode.longest = sequence.images[0][1] + 1
    with pytest.raises(RowError, match="none of its trained tokens"):
        encode(row)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"images": ["gone.png"]}, "gone.png"),
        ({"images": [b"no image"]}, "damaged, or not an image"),
        ({"images": []}, "1 places for images .* the column 'images' has 0"),
        ({"images": "two"}, "1 places .* has 2"),
        ({"images": ["https://example.org/a.png"]}, "download"),
        ({"videos": [["a.png"]]}, "1 places"),
        ({"images": "wide"}, "image 1 cannot be processed"),
    ],
)
def test_bad_images_are_refused_by_name(row, problem, tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    given = {"two": tiny.images(2), "wide": [tiny.images(1)[0].resize((2, 900))]}
    row = {k: given.get(v, v) if isinstance(v, str) else v for k, v in row.items()}
    with pytest.raises(RowError, match=problem):
        encode(Row({"messages": [turn("<image>what?"), turn("that", "assistant")]} | row, str(tmp_path)))


def test_images_for_a_model_or_a_turn_that_cannot_have_them_are_refused(tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    row = {"messages": [turn("<image>what?"), turn("that", "assistant")], "images": tiny.images(1)}
    text_only = Encoder(SFTConfig().data, encode.tokenizer, 2048)
    with pytest.raises(RowError, match="it has images or videos, and the model reads text only"):
        text_only(Row(row))
    shown = turn(parts("image", "this one"), "assistant")
    with pytest.raises(RowError, match=r"message 2 \(assistant\) has an image, which a model cannot write"):
        encode(Row({"messages": [turn("show me"), shown], "images": tiny.images(1)}))
    with pytest.raises(RowError, match="it has images and plain text"):
        encode(Row({"text": "plain", "images": tiny.images(1)}))
    # A mark is plain text where the model reads text only.
    (sequence,) = text_only(Row({"messages": row["messages"]})).sequences
    assert "<image>what?" in encode.tokenizer.decode(sequence.tokens)


def test_prompt_and_completion_with_images_become_a_dialogue(tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    row = {"prompt": "what?", "completion": "that", "images": tiny.images(1)}
    (sequence,) = encode(Row(row)).sequences
    text = shown(sequence, encode.tokenizer, False)
    assert f"<|vision_start|><|image_pad|> (x {sequence.images[0][0].tokens}) <|vision_end|>what?" in text
    assert len(sequence.images) == 1 and isinstance(sequence.images[0][0], Payload)
    assert encode.tokenizer.decode(sequence.tokens[sequence.mask]) == "that<|im_end|>"


def pair_encoder(family: str, folder: Path, pairs: bool = True, beside: bool = False) -> PairEncoder:
    one = encoder(family, folder)
    return PairEncoder(PreferenceConfig().data, one.tokenizer, 2048, pairs, beside, one.images)


def test_both_sides_of_a_pair_show_the_images_of_its_row(tmp_path):
    encode, picture = pair_encoder("qwen2_5_vl", tmp_path), tiny.images(1)
    prompt, good, bad = turn("<image>what?"), turn("this", "assistant"), turn("that", "assistant")
    rows = [
        {"chosen": [prompt, good], "rejected": [prompt, bad]},
        {"prompt": [turn(parts("image", "what?"))], "chosen": [good], "rejected": [bad]},
        {"prompt": "what?", "chosen": "this", "rejected": "that"},
    ]
    found = [encode(Row(row | {"images": picture})).sequences for row in rows]
    for chosen, rejected in found:
        assert [len(side.images) for side in (chosen, rejected)] == [1, 1]
        assert chosen.images[0][0] is rejected.images[0][0] is found[0][0].images[0][0], "processed once"
        texts = [encode.encoder.tokenizer.decode(side.tokens[side.mask]) for side in (chosen, rejected)]
        assert texts == ["this<|im_end|>", "that<|im_end|>"]
        assert torch.equal(chosen.tokens, found[0][0].tokens)
    batch = pack_pair_sides([(0, 0, found[0][0]), (0, 1, found[0][1])], True, True, placeholder=6)
    assert [len(row) for row in batch.images] == [1, 1]


def test_responses_of_other_rows_follow_the_images_of_this_one(tmp_path):
    encode, (a, b) = pair_encoder("qwen2_5_vl", tmp_path, False, True), tiny.images(2)
    rows = [
        Row({"prompt": "<image>what?", "completion": text, "label": True, "images": [image]})
        for text, image in (("this", a), ("that", b))
    ]
    own, mixed = encode(rows[0], rows[1]).sequences
    assert own.images[0][0] is mixed.images[0][0]
    assert encode.encoder.tokenizer.decode(mixed.tokens).endswith("that<|im_end|>\n"[: len("that<|im_end|>")])


def test_models_that_read_text_only_refuse_rows_with_images(tmp_path):
    tokenizer = encoder("qwen2_5_vl", tmp_path).tokenizer
    row = {"prompt": "what?", "chosen": "this", "rejected": "that", "images": tiny.images(1)}
    with pytest.raises(RowError, match="the model reads text only"):
        PairEncoder(PreferenceConfig().data, tokenizer, 2048, True)(Row(row))
    steps = {"prompt": "what?", "completions": ["this"], "labels": [True], "images": tiny.images(1)}
    with pytest.raises(RowError, match="the model reads text only"):
        StepEncoder(RewardModelConfig(), tokenizer, 2048)(Row(steps))


def test_templates_that_leave_images_out_and_typed_placeholders_are_refused(tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    row = {"messages": [turn("<image>what?"), turn("that", "assistant")], "images": tiny.images(1)}
    typed = [turn("a <|image_pad|>"), turn("b", "assistant"), turn("<image>later")]
    for messages in (typed, [turn("<image>a"), turn("b <|image_pad|>", "assistant")]):
        with pytest.raises(RowError, match=r"has the text <\|image_pad\|>, which stands for an image"):
            encode(Row({"messages": messages, "images": tiny.images(1)}))
    with pytest.raises(RowError, match="its text has 1 placeholders for images, and its messages show 0"):
        encode(Row({"text": "plain <|image_pad|>"}))
    (sequence,) = encode(
        Row({"messages": [*row["messages"], turn("<image>later")], "images": tiny.images(2)})
    ).sequences
    assert len(sequence.images) == 1, "an image after the last turn is left out with its message"
    tokenizer = encode.tokenizer
    for parts_of in (
        "{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}",
        "{{ m['content'] }}",
    ):
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
            + parts_of
            + "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
        )
        without = Encoder(SFTConfig().data, tokenizer, 2048, "assistant", encode.images)
        with pytest.raises(RowError, match="its text has 0 placeholders for images, and its messages show 1"):
            without(Row(row))


def test_any_text_in_the_column_image_is_a_path_where_images_are_read(tmp_path):
    encode = encoder("qwen2_5_vl", tmp_path)
    talk = [turn("what?"), turn("that", "assistant")]
    with pytest.raises(RowError, match="image 1 of 1: .*photo.jfif"):
        encode(Row({"messages": talk, "image": "photo.jfif"}, str(tmp_path)))
    text_only = Encoder(SFTConfig().data, encode.tokenizer, 2048)
    assert len(text_only(Row({"messages": talk, "image": "ubuntu:24.04"})).sequences) == 1
    with pytest.raises(RowError, match="the model reads text only"):
        text_only(Row({"messages": talk, "image": "photo.jpg"}))


def test_a_frozen_model_must_read_images_alike(tmp_path):
    names = {"student": {}, "same": {}, "other": {"image_mean": [0.1, 0.1, 0.1]}}
    for name, more in names.items():
        tiny.saved("qwen2_5_vl", tmp_path / name)
        settings = tiny.processor_settings("qwen2_5_vl") | more
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(settings))
    check_same_images(str(tmp_path / "same"), tmp_path / "student", False, "--teacher.path")
    check_same_images("tiny", tmp_path / "student", False, "--teacher.path")
    with pytest.raises(ValueError, match=r"--teacher.path .*other: it reads images in another way"):
        check_same_images(str(tmp_path / "other"), tmp_path / "student", False, "--teacher.path")


def test_template_of_a_processor_is_read(tmp_path):
    tiny.saved("qwen2_5_vl", tmp_path)
    template = load_tokenizer(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(tmp_path).chat_template == template


def test_text_needs_no_image_processor_and_no_supported_tower(tmp_path):
    import transformers

    encode = encoder("qwen2_5_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert len(encode(Row({"messages": [turn("what?"), turn("that", "assistant")]})).sequences) == 1
    with pytest.raises(ValueError, match="no preprocessor_config.json"):
        encode(Row({"messages": [turn("<image>"), turn("that", "assistant")], "images": tiny.images(1)}))
    transformers.Gemma3Config().save_pretrained(tmp_path / "other")
    assert image_reader(tmp_path / "other", encode.tokenizer, False) is None
