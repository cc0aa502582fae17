"""Images of RL prompts: rows of every form, refused rows, and images on the way of an episode."""

import base64
import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from spmdrl.checkpoint import treefile
from spmdrl.config.schema import DataConfig
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.pack import from_episodes, to_episodes
from spmdrl.data.prompts import load_prompts
from spmdrl.rl.trees import Images, batch_of, batch_tree, episode_tree
from spmdrl.rl.trees import episode as episode_from
from spmdrl.session.image_reader import image_reader
from tests.unit import vision_models as tiny


@pytest.fixture(scope="module", params=["qwen2_5_vl", "idefics3"])
def reader(request, tmp_path_factory):
    """Returns a family, its tokenizer with a template, and its reader of images."""
    folder = tiny.saved(request.param, tmp_path_factory.mktemp(request.param))
    tokenizer = tiny.chat_tokenizer(request.param)
    return request.param, tokenizer, image_reader(folder, tokenizer, False)


def png(image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def load(reader, rows, tmp_path, longest=4000, **data):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(str(file), DataConfig(**data), reader[1], longest, images=reader[2])


def test_rows_of_every_form_give_the_ids_of_transformers_processor(reader, tmp_path):
    family, tokenizer, _ = reader
    a, b = tiny.images(2, seed=3)
    a.save(tmp_path / "a.png")
    url = "data:image/png;base64," + base64.b64encode(png(b)).decode()
    parts = [{"type": "image"}, {"type": "text", "text": "left"}, {"type": "image"}]
    inner = [parts[0] | {"image": "a.png"}, parts[1], {"type": "image_url", "image_url": {"url": url}}]
    rows = [
        {"prompt": "<image>left<image>", "images": ["a.png", {"path": "a.png", "bytes": None}]},
        {"prompt": [{"role": "user", "content": "<image>left<image>"}], "images": [{"path": "a.png"}, url]},
        {"prompt": [{"role": "user", "content": parts}], "images": ["a.png", url]},
        {"prompt": [{"role": "user", "content": inner}]},
        {"prompt": "no image"},
    ]
    verl = {"data_source": "x", "reward_model": {"ground_truth": "1", "style": "rule"}, "ability": "see"}
    found = load(reader, [row | {"answer": "1"} for row in rows], tmp_path).prompts
    found += load(reader, [rows[1] | verl], tmp_path).prompts
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    want = tiny.processor(family)(text=[text], images=[[a, b]] if family in tiny.TILED else [a, b])["input_ids"][0]
    assert [p.tokens for p in found[1:4]] == [list(want)] * 3 and found[5].tokens == list(want)
    assert [len(p.images) for p in found] == [2, 2, 2, 2, 0, 2]
    first, second = found[0].images
    assert first.name == second.name == found[1].images[0].name != found[1].images[1].name
    placeholder = reader[2].vision.image
    assert all(p.tokens[i.at] == placeholder != p.tokens[i.at - 1] for p in found for i in p.images)


def test_rows_whose_images_cannot_be_used_are_refused_by_name_and_counted(reader, tmp_path):
    (tmp_path / "damaged.png").write_bytes(png(tiny.images(1)[0])[:60])
    tiny.images(1)[0].save(tmp_path / "a.png")
    mark = reader[2].mark
    bad = {
        "missing.png": ("<image>", ["missing.png"], "missing.png"),
        "damaged": ("<image>", ["damaged.png"], "image 1 of 1: the image"),
        "http": ("<image>", ["http://host/a.png"], "http"),
        "more places": ("<image><image>", ["a.png"], "2 places"),
        "more images": ("<image>", ["a.png", "a.png"], "has 2"),
        "pixels of one image": ("<image>", [{"path": "a.png", "max_pixels": 99}], "max_pixels"),
    }
    if mark != "<image>":
        bad["typed"] = (f"<image>{mark}", ["a.png"], "has the text")
    good = [{"prompt": "<image>x", "images": ["a.png"], "answer": 1}] * 60
    for name, (prompt, images, says) in bad.items():
        prompts = load(reader, [*good, {"prompt": prompt, "images": images, "answer": 1}], tmp_path)
        (line,) = prompts.left
        assert len(prompts) == 60 and "rows.jsonl:61" in line and says in line, (name, line)
        with pytest.raises(ValueError, match=r"rows\.jsonl:1.*refused rows: 1 of 1; --data.max-refused 0.05 bounds"):
            load(reader, [{"prompt": prompt, "images": images, "answer": 1}], tmp_path)
    both = {"prompt": "<image>", "images": ["a.png"], "image": "a.png", "answer": 1}
    (line,) = load(reader, [good[0], both], tmp_path, max_refused=0.5).left
    assert "both of its columns 'images' and 'image' hold images" in line
    for more in ({"chat_template": "{{ messages[0]['role'] }}"}, {"system": mark}):
        with pytest.raises(ValueError, match=r"its text has \d placeholders for images, and its messages"):
            load(reader, good[:1], tmp_path, **more)
    with pytest.raises(ValueError, match="a prompt with images or parts needs a chat template"):
        load(reader, good[:1], tmp_path, chat="off")
    dropped = load(reader, [{"prompt": "x", "answer": 1}, *good[:3]], tmp_path, longest=40)
    assert len(dropped) == 1 and dropped.dropped == 3, "a prompt is as long as its expanded tokens"


def test_an_image_that_changes_after_the_start_is_refused(reader, tmp_path):
    one, other = tiny.images(2, seed=5)
    one.save(tmp_path / "a.png")
    (prompt,) = load(reader, [{"prompt": "<image>x", "images": ["a.png"], "answer": 1}], tmp_path).prompts
    ((at, payload),) = reader[2].read_again(prompt.images)
    assert payload.name == prompt.images[0].name and at == prompt.images[0].at
    other.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png' has changed"):
        reader[2].read_again(replace(prompt, images=(*prompt.images,)).images + ())


def shown(reader, text: str, pictures: list[Image.Image]):
    """Returns expanded tokens of a text with marks for pictures, and the images with their places."""
    payloads = reader[2].read(pictures, "")
    ids = reader[1](text.replace("IMAGE", tiny.image_text(reader[0])), add_special_tokens=False)["input_ids"]
    found = reader[2].expand(ids, payloads)
    return found.ids.tolist(), tuple(zip(found.firsts, payloads, strict=True))


def test_forks_share_a_prefix_only_as_far_as_its_images_are_equal(reader):
    a, b, c = (Image.new("RGB", (40, 40), colour) for colour in ("red", "blue", "green"))
    tokens, images = shown(reader, "one IMAGE two IMAGE three", [a, b])
    placeholder = reader[2].vision.image
    for pictures, text, shares in (([a, b], "one IMAGE two IMAGE other", 2), ([a, c], "one IMAGE two IMAGE three", 1)):
        episode = Episode(0, 0, 0, [prompt_segment(tokens, images)])
        episode.add_sampled([300], [-1.0], 0)
        again, other = shown(reader, text, pictures)
        shared = episode.fork(again, images=other)
        assert episode.tokens.tolist() == again and list(episode.images) == [image for _, image in other]
        kept = [image for at, image in images if at < shared]
        assert len(kept) == shares
        for segment in episode.segments:
            wanted = sum(image.tokens for _, image in segment.images)
            assert int((segment.tokens == placeholder).sum()) == wanted
            assert all(segment.tokens[at] == placeholder for at, _ in segment.images)
        episode.add_sampled([301], [-1.0], 0)
        episode.finish = "stop"
        batch = from_episodes([episode], placeholder=placeholder)
        assert [len(row) for row in batch.images] == [2, 2]
        (back,) = to_episodes(batch)
        assert [[i.name for i in (x for _, x in s.images)] for s in back.segments] == [
            [i.name for i in (x for _, x in s.images)] for s in episode.segments
        ]
        again = from_episodes([back], placeholder=placeholder)
        assert torch.equal(again.token["image"], batch.token["image"])


def test_resume_trees_hold_each_image_once(reader, tmp_path):
    picture = tiny.images(1, seed=8)[0]
    tokens, images = shown(reader, "see IMAGE now", [picture])
    episodes = []
    for sample in range(3):
        episode = Episode(0, sample, 0, [prompt_segment(tokens, images)])
        episode.add_sampled([300], [-1.0], 0)
        episode.finish = "stop"
        episodes.append(episode)
    held, placeholder = Images(), reader[2].vision.image
    batch = from_episodes(episodes, placeholder=placeholder)
    tree = {"episodes": [episode_tree(e, held) for e in episodes], "batch": batch_tree(batch, held)}
    treefile.write(tmp_path / "tree", tree | {"images": held.tree()})
    read = treefile.read(tmp_path / "tree")
    assert len(read["images"]) == 1
    back = Images.of(read["images"])
    again = [episode_from(e, back) for e in read["episodes"]]
    assert all(
        torch.equal(e.images[0].pixels, images[0][1].pixels) and e.images[0].grid == images[0][1].grid for e in again
    )
    assert [row[0].name for row in batch_of(read["batch"], back).images] == [images[0][1].name] * 3


def test_samples_show_one_placeholder_for_an_image(reader):
    family, tokenizer, images = reader
    wide = Image.new("RGB", (70, 40), "red")
    tokens, places = shown(reader, "see IMAGE and IMAGE now", [wide, tiny.images(1)[0]])
    text = tokenizer.decode(prompt_segment(tokens, places).readable())
    assert text.count(images.mark) == 2 and text.startswith("see ") and text.endswith(" now")
    assert len(tokens) > 12 and text.count("<row_") == (family in tiny.TILED) * 2


def test_text_needs_no_image_processor(reader, tmp_path):
    folder = tiny.saved(reader[0], tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    bare = reader[0], reader[1], image_reader(folder, reader[1], False)
    assert len(load(bare, [{"prompt": "no image", "answer": 1}], tmp_path)) == 1
    tiny.images(1)[0].save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: no preprocessor_config\.json"):
        load(bare, [{"prompt": "<image>x", "images": ["a.png"], "answer": 1}], tmp_path)


def test_a_sampled_placeholder_is_refused(reader):
    tokens, images = shown(reader, "see IMAGE", tiny.images(1))
    episode = Episode(0, 0, 0, [prompt_segment(tokens, images)])
    episode.add_sampled([reader[2].vision.image], [-1.0], 0)
    episode.finish = "stop"
    with pytest.raises(ValueError, match="placeholder tokens for images, but its 1 images need"):
        from_episodes([episode], placeholder=reader[2].vision.image)
