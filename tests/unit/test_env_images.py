"""Images of environments and tools, from their code to the messages of replies."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmdrl.env import Answer, open_image
from spmdrl.env.__main__ import main
from spmdrl.env.answers import tool_result
from spmdrl.env.base import BrokenError
from spmdrl.env.messages import FailedError, added, messages_of, opening
from spmdrl.env.pictures import PIXELS, encoded, in_words, row_with_images
from spmdrl.env.play import Play, PlayError
from spmdrl.env.terminal import by_hand

ROOT = Path(__file__).resolve().parents[2]
USER = '''
import numpy as np
from PIL import Image

from spmdrl.env import Answer, History, open_image


def noise(seed, size=(48, 64, 3)):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Album:
    """Shows pictures in every form."""

    def reset(self, row, seed):
        self.row = row
        first = [{"type": "image", "image": noise(0)}, "Look."]
        return None if "prompt" in row else [{"role": "user", "content": first}]

    def see(self, what: str):
        """Look.

        Args:
            what: name of the form
        """
        image = Image.fromarray(noise(1))
        if what == "row":
            return open_image(self.row["images"][0]).crop((0, 0, 5, 4))
        if what == "large":
            return Image.new("L", (1 << 13, 1 << 12))
        if what == "float":
            return [{"type": "image", "image": noise(1).astype(np.float32)}]
        return {
            "bare": image,
            "mixed": ["left", image, "right " * 100],
            "answer": Answer([{"type": "text", "text": "look"}, {"type": "image", "image": noise(1)}], 0.5),
            "rewarded": ([{"type": "image", "image": image}], 0.25),
            "texts": ["a", "b"],
            "json": [{"type": "text", "text": "a", "score": 1}],
            "damaged": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        }[what]

    def step(self, message):
        if message["content"] == "forget":
            return History([{"role": "user", "content": [{"type": "image", "image": noise(2)}]}]), 0.0, False
        return (Image.fromarray(noise(3)) if message["content"] == "next" else None), None, message["content"] == "bye"


class Atari:
    """Observations in Gymnasium's form are pixels."""

    def reset(self, *, seed=None, options=None):
        return noise(5), {}

    def step(self, action):
        return noise(6), 1.0, False, False, {}


class Game:
    """In the form of TRL: begins with a picture, and its tool returns one."""

    def reset(self, **columns):
        return [{"type": "image", "image": noise(7)}, {"type": "text", "text": " What is it?"}]

    def turn(self) -> list:
        """Turn the picture."""
        return [{"type": "image", "image": Image.fromarray(noise(7)).rotate(90, expand=True)}]
'''


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def pixels(part: dict) -> np.ndarray:
    assert part.keys() == {"type", "image"} and part["type"] == "image"
    return np.asarray(open_image(part["image"]))


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "album.py"
    path.write_text(USER)
    with Play(f"{path}:Album") as play:
        yield play


def test_reset_tools_and_step_show_images_without_loss(album):
    (first,) = album.open().messages
    assert np.array_equal(pixels(first["content"][0]), noise(0))
    assert first["content"][1] == {"type": "text", "text": "Look."}
    for what, texts in {"bare": [], "mixed": ["left", "right " * 100], "answer": ["look"], "rewarded": []}.items():
        reply = album.call("see", what=what)
        (message,) = reply.messages
        assert message["role"] == "tool" and message["name"] == "see"
        assert [part["text"] for part in message["content"] if part["type"] == "text"] == texts
        (image,) = (part for part in message["content"] if part["type"] == "image")
        assert np.array_equal(pixels(image), noise(1)) and reply.counts["failed_calls"] == 0
        assert reply.reward == {"answer": 0.5, "rewarded": 0.25}.get(what)
    assert json.loads(album.call("see", what="texts").messages[0]["content"]) == ["a", "b"]
    assert json.loads(album.call("see", what="json").messages[0]["content"])[0]["score"] == 1
    (shown,) = album.say("next").messages
    assert shown["role"] == "user" and np.array_equal(pixels(shown["content"][0]), noise(3))
    anew = album.say("forget")
    assert anew.anew and np.array_equal(pixels(anew.messages[0]["content"][0]), noise(2))


def test_the_images_of_a_row_reach_tools_and_the_first_messages(album, tmp_path):
    url = encoded(Image.fromarray(noise(4)))[0]["image"]
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Crop "}, {"type": "image", "image": url}]}]
    reply = album.open({"prompt": prompt, "images": [url]})
    assert reply.messages == prompt
    (crop,) = album.call("see", what="row").messages[0]["content"]
    assert np.array_equal(pixels(crop), noise(4)[:4, :5])


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("large", r"has 8192 x 4096 = 33,554,432 pixels, and at most 16,777,216 are decoded"),
        ("float", "an array of float32"),
        ("damaged", "damaged, or not an image"),
    ],
)
def test_an_image_that_cannot_be_shown_fails_the_episode_by_name(album, what, why):
    assert PIXELS < 1 << 25
    album.open()
    with pytest.raises(PlayError, match=rf"album.py:Album .* failed in tool see: .*{why}"):
        album.call("see", what=what)


def test_forms_of_gym_and_trl(album):
    path = album.name.partition(":")[0]
    with Play(f"{path}:Atari") as play:
        (first,) = play.open({"prompt": "Play."}).messages
        assert first["content"][0] == {"type": "text", "text": "Play."}
        assert np.array_equal(pixels(first["content"][1]), noise(5))
        assert np.array_equal(pixels(play.say("up").messages[0]["content"][0]), noise(6))
    with Play(f"{path}:Game") as play:
        (first,) = play.open({"prompt": [{"role": "user", "content": "Look."}]}).messages
        assert [part.get("text") for part in first["content"]] == ["Look.", None, " What is it?"]
        turned = play.call("turn").messages[0]["content"][0]
        assert np.array_equal(pixels(turned), np.rot90(noise(7)))


def test_text_is_cut_and_images_are_not():
    image = Image.fromarray(noise(0))
    found = tool_result(["x" * 8, image, "y" * 8, "z"], 10, "head")
    texts = [part.get("text") for part in found.text]
    assert texts[0] == "x" * 8 and texts[1] is None and texts[2].startswith("yy\n[the head of 8") and found.was_cut
    assert texts[3].startswith("\n[the head of 1") and np.array_equal(pixels(found.text[1]), noise(0))
    assert tool_result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], 9, "head").text == "ab"
    with pytest.raises(FailedError, match="a part of type video"):
        messages_of([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "step", 10, "head")


def test_a_file_keeps_its_bytes(tmp_path):
    Image.fromarray(noise(0)).save(tmp_path / "a.jpg")
    raw = (tmp_path / "a.jpg").read_bytes()
    for source in (str(tmp_path / "a.jpg"), raw, {"bytes": raw, "path": None}):
        (part,) = encoded([{"type": "image", "image": source}])
        assert part["image"] == "data:image/jpeg;base64," + base64.b64encode(raw).decode()
    with pytest.raises(BrokenError, match="there is no image file"):
        encoded([{"type": "image", "image": "nowhere.png"}])
    assert encoded(Answer(1)) == Answer(1)


def test_contents_are_joined():
    image, text = {"type": "image", "image": "data:"}, {"type": "text", "text": "a"}
    assert added("a", "b", "-") == "a-b" and added([], "b") == "b" and added("a", []) == "a"
    assert added("a", [image]) == [text, image] and added([image], "a", "-") == [image, text]
    assert added([text], "a", "-") == [text, {"type": "text", "text": "-"}, text]
    assert opening({"prompt": "a"}, [image]) == [{"role": "user", "content": [text, image]}]


def test_the_terminal_shows_that_an_image_is_there(album):
    lines, typed = [], iter(["see('bare')", "/quit"])
    by_hand(album, {}, 0, lambda _: next(typed).replace("('", "(what='"), lines.append)
    assert "user: [image 64x48] Look." in lines and "tool see: [image 64x48]" in lines
    assert in_words("text") == "text" and in_words(None) == ""


def test_the_recipe_shows_a_small_picture_and_its_parts(tmp_path):
    sys.path.insert(0, str(ROOT))
    from recipes.vl_zoom.pictures import draw, write

    file = write(tmp_path, "train", range(2), 896)
    row = json.loads(file.read_text().splitlines()[1])
    picture, word, (left, top, right, bottom) = draw(1, 896)
    assert row["answer"] == word
    row = row_with_images(row | {"images": [str(tmp_path / row["images"][0])]})
    with Play(str(ROOT / "recipes/vl_zoom/zoom.py:Zoom"), {"looks": 2}) as play:
        (first,) = play.open(row).messages
        small = pixels(first["content"][0])
        assert small.shape == (224, 224, 3) and "zoom" in first["content"][1]["text"]
        assert np.array_equal(small, np.asarray(picture.resize((224, 224))))
        x, y = left * 1000 // 896, top * 1000 // 896
        (part,) = play.call("zoom", x=x, y=y, w=50, h=50).messages[0]["content"]
        box = x * 896 // 1000, y * 896 // 1000, -(-(x + 50) * 896 // 1000), -(-(y + 50) * 896 // 1000)
        crop = picture.crop(box)
        scale = 224 / max(crop.size)
        assert box[0] <= left and box[2] >= right and box[3] >= bottom, "the whole word is shown"
        assert np.array_equal(pixels(part), np.asarray(crop.resize([round(each * scale) for each in crop.size])))
        wrong = play.call("zoom", x=990, y=0, w=50, h=50).messages[0]["content"]
        assert "the part must lie inside the picture" in wrong
        assert isinstance(play.call("zoom", x=0, y=0, w=1000, h=1000).messages[0]["content"], list)
        assert "2 times already" in play.call("zoom", x=0, y=0, w=9, h=9).messages[0]["content"]
        done = play.say(f"The word is {word.lower()}.")
        assert done.done and done.reward == 1.0 and play.score().parts == {"looks": 2.0}
        play.open(row)
        assert play.say("It is XXXX").reward == 0.0


def test_try_places_the_images_of_a_row(tmp_path, capsys, monkeypatch):
    Image.fromarray(noise(0)).save(tmp_path / "a.png")
    row = {"prompt": "Which <image>word?", "images": [str(tmp_path / "a.png")], "answer": "a"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
    assert main(["try", str(ROOT / "recipes/vl_zoom/zoom.py:Zoom"), "--row", json.dumps(row)]) == 0
    assert "user: Which  [image 64x48] word?" in capsys.readouterr().out
    row |= {"images": [str(tmp_path / "b.png")]}
    assert main(["try", str(ROOT / "recipes/vl_zoom/zoom.py:Zoom"), "--row", json.dumps(row)]) == 2
    assert "there is no image file" in capsys.readouterr().err


def test_a_worker_imports_no_library_for_images():
    code = "import sys, spmdrl.env.worker; print(*sorted({'PIL', 'numpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
