"""Images of rows: their places in messages in verl's and TRL's forms, and their pixels from every kind of source."""

import ast
import base64
import copy
import importlib.util
import io
import os
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmdrl.data.image_files import FORMATS, ImageError, decode, decode_all, name_of
from spmdrl.data.images import has_items, illustrated
from spmdrl.data.row_columns import Row, RowError
from spmdrl.data.rowfiles import open_rows
from spmdrl.data.sources import read_source

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
MUCH = 10**6


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def turn(role: str, content) -> dict:
    return {"role": role, "content": content}


def pixels(seed: int = 0, height: int = 6, width: int = 9, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **how) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    """Returns a PNG whose header states a size, and which holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def refusal(source, folder=".", most: int = MUCH, read=decode) -> str:
    with pytest.raises(ImageError) as caught:
        read(source, folder, most)
    return str(caught.value)


# Places in messages


def test_parity_verl_marks_stand_in_order_for_the_columns_and_the_texts_between_them_are_kept():
    messages = [
        turn("system", "Look."),
        turn("user", "<image>A <image>\nB<video>"),
        turn("assistant", "Fine."),
        turn("tool", "now <image>"),
    ]
    row = {"prompt": messages, "images": ["a.png", {"bytes": b"b"}, {"image": "c.png"}], "videos": [["f1", "f2"]]}
    before = copy.deepcopy(row)
    found = illustrated(row, messages)
    assert [m["content"] for m in found.messages] == [
        [text("Look.")],
        [IMAGE, text("A "), IMAGE, text("\nB"), VIDEO],
        [text("Fine.")],
        [text("now "), IMAGE],
    ]
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool"]
    assert found.images == ["a.png", {"bytes": b"b"}, {"image": "c.png"}] and found.videos == [["f1", "f2"]]
    assert row == before, "the row is not changed"


def trl_function():
    """Returns TRL's own function out of its file, without importing its trainers."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed (launch/install.sh --dev)")
    tree = ast.parse((Path(spec.origin).parent / "data_utils.py").read_text())
    wanted = [node for node in tree.body if getattr(node, "name", "") == "prepare_multimodal_messages"]
    space = {"Any": object}
    exec(compile(ast.Module(wanted, []), "trl", "exec"), space)
    return space["prepare_multimodal_messages"]


TRL_ROWS = {
    "texts alone": ([turn("system", "S"), turn("user", "Q"), turn("assistant", "A"), turn("user", "R")], ["a", "b"]),
    "places in parts": ([turn("user", [text("Q"), IMAGE, IMAGE]), turn("assistant", [text("A")])], ["a", "b"]),
    "images in parts": ([turn("user", [{"type": "image", "image": "x"}, text("Q")])], []),
    "both": ([turn("user", [{"type": "image", "image": "x"}, IMAGE, text("Q")]), turn("assistant", "A")], ["a"]),
}


@pytest.mark.parametrize("name", TRL_ROWS)
def test_parity_trl_puts_the_same_images_in_the_same_places(name):
    messages, images = TRL_ROWS[name]
    theirs = trl_function()(copy.deepcopy(messages), images=images)
    mine = illustrated({"images": images} if images else {}, messages)
    placed = [part for message in theirs for part in message["content"] if part["type"] == "image"]
    assert [i if isinstance(i, str) else i["image"] for i in mine.images] == [part["image"] for part in placed]
    bare = [turn(m["role"], [IMAGE if p["type"] == "image" else p for p in m["content"]]) for m in theirs]
    assert mine.messages == bare


def test_images_in_parts_of_every_form_are_found_in_order():
    parts = [
        {"type": "image_url", "image_url": {"url": "u.png", "detail": "low"}},
        {"type": "image", "path": "p.png", "text": None},
        {"image": "no type.png"},
        {"type": "image", "base64": "aGk="},
        {"type": "text", "text": "see", "image": None},
        {"type": "video", "video": ["f1", "f2"]},
    ]
    found = illustrated({}, [turn("user", parts), {"role": "assistant", "tool_calls": [1]}, turn("assistant", "")])
    assert found.messages[0]["content"] == [IMAGE] * 4 + [text("see"), VIDEO]
    assert found.messages[1] == {"role": "assistant", "tool_calls": [1]} and found.messages[2]["content"] == []
    assert found.images == [
        {"image_url": {"url": "u.png", "detail": "low"}},
        {"path": "p.png"},
        {"image": "no type.png"},
        {"base64": "aGk="},
    ]
    assert found.videos == [{"video": ["f1", "f2"]}]


def test_rows_without_images_are_unchanged_and_marks_that_an_assistant_writes_are_text():
    messages = [
        turn("user", "Use the <video> tag"),
        turn("assistant", "an <image> is <video>"),
        turn("user", [text("x")]),
    ]
    assert not has_items({"image": "python:3.11"}, text_only=True) and has_items({"image": "python:3.11"})
    for row in ({}, {"images": None}):
        found = illustrated(row, messages)
        assert found.messages == messages and found.images == found.videos == []
    # Templates look whether a part has the key `image`, so the gaps of a table must go.
    gaps = illustrated({"images": []}, [turn("user", [{"type": "text", "text": "x", "image": None}])])
    assert gaps.messages == [turn("user", [text("x")])]


@pytest.mark.parametrize(
    "column, value, many",
    [
        ("image", "a.png", 1),
        ("image", {"bytes": b"x"}, 1),
        ("image", ["a", "b"], 2),
        ("images", "a", 1),
        ("images", ("a", "b"), 2),
        ("images", np.array(["a", "b"], dtype=object), 2),
        ("images", pixels(), 1),
        ("images", pixels()[None].repeat(2, 0), 2),
    ],
)
def test_a_column_may_hold_one_image_or_several(column, value, many):
    found = illustrated({column: value}, [turn("user", "<image>" * many)])
    assert len(found.images) == many and found.messages == [turn("user", [IMAGE] * many)]


def test_columns_have_other_names_or_none_and_count_as_read():
    row = Row({"pics": ["a"], "clips": [["f"]], "images": ["no"]})
    found = illustrated(row, [turn("user", "<image><video>")], images="pics", videos="clips")
    assert found.images == ["a"] and found.videos == [["f"]] and row.unread == ["images"]
    assert illustrated(row, [turn("user", "no images")], images="", videos="").images == []
    one = illustrated({"video": ["f1", "f2"]}, [turn("user", "<video>")])
    assert one.videos == [["f1", "f2"]], "the column `video` holds the frames of one video"


@pytest.mark.parametrize(
    "row, messages, places, items",
    [
        ({"images": ["a"]}, [turn("user", "<image><image>")], 2, 1),
        ({"images": ["a", "b", "c"]}, [turn("user", "<image> x")], 1, 3),
        ({}, [turn("user", "<image> x")], 1, 0),
        ({"images": []}, [turn("system", "<image> x"), turn("user", "y")], 1, 0),
        ({}, [turn("user", [IMAGE, text("x")])], 1, 0),
        ({"images": ["a"]}, [turn("user", [text("<image> x")])], 0, 1),
        ({"images": ["a", "b"]}, [turn("user", [{"type": "image", "image": "z"}, text("x")])], 0, 2),
        ({"images": ["a"]}, [turn("system", "nobody asks")], 0, 1),
        ({"images": ["a"]}, [turn("user", "<image><video>")], 1, 0),
        ({"videos": [["f"]]}, [turn("user", "x")], 0, 1),
    ],
)
def test_places_and_images_of_other_numbers_are_refused_with_both(row, messages, places, items):
    with pytest.raises(RowError, match=rf"have {places} places for \w+ .* column '\w+' has {items}: the numbers"):
        illustrated(row, messages)


@pytest.mark.parametrize(
    "messages, says",
    [
        ([turn("user", "q"), turn("assistant", "the tag <image>")], "message 2 (assistant) has the mark <image>"),
        ([turn("user", [{"type": "audio", "audio": "x"}])], "part 1 of message 1 has the type 'audio'; known types"),
        ([turn("user", [IMAGE, {"type": "text"}])], "part 2 of message 1 is a text without text"),
        ([turn("user", ["x"])], "part 1 of message 1 is str"),
        ([turn("user", 3)], "the content of message 1 is int"),
        ([turn("user", [{"type": ["image"]}])], "has the type ['image']"),
    ],
)
def test_malformed_contents_are_refused_by_their_place(messages, says):
    with pytest.raises(RowError, match=re.escape(says)):
        illustrated({"images": ["a"]}, messages)


# Pixels


def test_every_kind_of_source_gives_the_same_pixels_and_name(tmp_path):
    array = pixels()
    image = Image.fromarray(array)
    data = encoded(image)
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "an image.png"
    path.write_bytes(data)
    (tmp_path / "~odd.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [
        *("sub/an image.png", str(path), path, path.as_uri(), "~odd.png", url, data, bytearray(data), image, array),
        *({"bytes": data, "path": "gone.png"}, {"bytes": None, "path": "sub/an image.png"}, {"image": image}),
        *({"image": url}, {"image_url": {"url": url, "detail": "low"}}, {"base64": url.partition(",")[2]}),
        *({"base64": url}, {"type": "image", "image": {"bytes": data}}, Image.open(path)),
        np.asfortranarray(array),
    ]
    found = [*decode_all(sources, tmp_path, array.shape[0] * array.shape[1])]
    assert all(each.mode == "RGB" and np.array_equal(each, array) for each in found)
    assert len({name_of(each) for each in found}) == 1 and all(each is not image for each in found)
    assert decode({"path": "sub/an image.png"}, str(tmp_path), MUCH).size == (9, 6)


def test_names_follow_the_pixels_and_the_size():
    array = pixels()
    changed = array.copy()
    changed[0, 0, 0] ^= 1
    turned = array.reshape(9, 6, 3)
    names = [name_of(decode(each, ".", MUCH)) for each in (array, changed, turned, array)]
    assert len(set(names)) == 3 and names[0] == names[3] and all(re.fullmatch("[0-9a-f]{64}", name) for name in names)


def on_white(rgba: np.ndarray) -> np.ndarray:
    color, alpha = rgba[..., :3].astype(float), rgba[..., 3:] / 255
    return color * alpha + 255 * (1 - alpha)


def test_alpha_is_put_on_white_in_every_mode():
    rgba = pixels(1, channels=4)
    image = Image.fromarray(rgba)
    gray = Image.fromarray(np.ascontiguousarray(rgba[..., 2:])).convert("LA")
    for source, whole in (
        (image, rgba),
        (encoded(image), rgba),
        (encoded(image, "WEBP", lossless=True, exact=True), rgba),
        (rgba, rgba),
        (encoded(gray), np.asarray(gray.convert("RGBA"))),
    ):
        np.testing.assert_allclose(np.asarray(decode(source, ".", MUCH)).astype(float), on_white(whole), atol=1.01)
    # Transparency without an alpha channel: one color of a palette, of gray and of RGB.
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 0])
    palette.putpixel((1, 0), 1)
    assert np.asarray(decode(palette, ".", MUCH)).tolist() == [[[10, 20, 30], [200, 100, 0]]]
    for form in ("PNG", "GIF"):
        data = encoded(palette, form, transparency=0)
        assert np.asarray(decode(data, ".", MUCH)).tolist() == [[[255, 255, 255], [200, 100, 0]]]
    rgb = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    data = encoded(rgb, transparency=(1, 2, 3))
    assert np.asarray(decode(data, ".", MUCH)).tolist() == [[[255, 255, 255], [4, 5, 6]]]
    data = encoded(Image.fromarray(np.array([[7, 8]], np.uint8)), transparency=7)
    assert np.asarray(decode(data, ".", MUCH)).tolist() == [[[255] * 3, [8] * 3]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_data_says(orientation):
    seen = pixels(2)
    # The transform that a viewer applies, by the table of the EXIF standard; here its inverse makes the stored pixels.
    turn_back = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    stored = Image.fromarray(np.ascontiguousarray(turn_back(seen)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form, how in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        data = encoded(stored, form, exif=exif, **how)
        opened = Image.open(io.BytesIO(data))
        assert np.array_equal(decode(data, ".", MUCH), seen), form
        assert np.array_equal(decode(opened, ".", MUCH), seen), form
        # A second decoding must not turn the image again.
        assert np.array_equal(decode(decode(opened, ".", MUCH), ".", MUCH), seen), form


def test_gray_bilevel_cmyk_and_16_bits_become_rgb():
    levels = np.array([[0, 128, 257, 30000, 65535]], np.uint16)
    expected = np.round(levels / 65535 * 255).astype(np.uint8)[..., None].repeat(3, -1)
    deep = Image.fromarray(levels)
    netpbm = b"P5 5 1 65535\n" + levels.astype(">u2").tobytes()
    for source in (deep, encoded(deep), encoded(deep, "TIFF"), netpbm):
        assert np.array_equal(decode(source, ".", MUCH), expected)
    gray = pixels(3)[..., 0]
    assert np.array_equal(decode(encoded(Image.fromarray(gray)), ".", MUCH), gray[..., None].repeat(3, -1))
    bits = Image.fromarray(gray > 127)
    assert np.array_equal(decode(encoded(bits), ".", MUCH), ((gray > 127) * np.uint8(255))[..., None].repeat(3, -1))
    # Pillow keeps inks inverted in memory: 0 is paper.
    inks = decode(Image.new("CMYK", (1, 1), (255, 0, 0, 0)), ".", MUCH)
    assert inks.getpixel((0, 0)) == (0, 255, 255)
    for mode in ("I", "F"):
        assert f"without a known range (mode {mode})" in refusal(Image.new(mode, (2, 2)))


def test_damaged_images_of_every_format_are_refused_and_whole_ones_are_not():
    image = Image.fromarray(pixels(4, 64, 48))
    for form in FORMATS:
        data = encoded(image, form)
        assert decode(data, ".", MUCH).size == (48, 64)
        for cut in (data[: len(data) // 2], data[: -len(data) // 10], data[:20], data[5:]):
            assert re.search("cannot be decoded|is damaged, or not an image", refusal(cut)), form
    assert "is damaged, or not an image of a format that is read here (JPEG, PNG" in refusal(b"")
    with pytest.raises(ImageError):
        decode(encoded(image, "ICO", sizes=[(16, 16)]), ".", MUCH)


def test_too_many_pixels_are_refused_by_the_header_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert "5000 x 4000 = 20,000,000 pixels, and at most 1,000,000" in refusal(png(5000, 4000))
    assert "at most 1,000,000" in refusal(Image.new("L", (1001, 1000)))
    assert "at most 53 are" in refusal(pixels(), most=53)
    # Beyond the limits of Pillow, whatever the run allows: it warns of the first and raises for the second.
    for action in ("ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            assert re.search("at most 89,478,485|too many pixels for Pillow", refusal(png(9000, 12000), most=10**12))
            assert "too many pixels for Pillow" in refusal(png(100_000, 100_000), most=10**12)


def test_sources_that_are_no_images_are_refused_with_advice(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for source, says in (
        ("gone.png", f"there is no image file '{tmp_path}/gone.png'"),
        ("folder.png", "there is no image file"),
        ("pipe.png", "there is no image file"),
        ("a" * 5000, "there is no image file"),
        ("nul\0.png", "there is no image file"),
        ("text.png", "text.png' is damaged, or not an image"),
        (
            "https://a.b/c.png",
            "'https://a.b/c.png' is on the network, and nothing is downloaded here: download it first",
        ),
        ("HTTP://a.b/c.png", "is on the network"),
        ("s3://bucket/c.png", "is on the network"),
        ("data:image/png,%89PNG", "is not in base64"),
        ("data:image/png;base64,@@@", "is not base64"),
        ({"base64": "aaaaa"}, "is not base64"),
        ({"base64": base64.b64encode(b"text").decode()}, "is damaged, or not an image"),
        ({"bytes": "aGk="}, "give text in base64 under the key 'base64'"),
        ({"bytes": None, "name": "x"}, "a dict without an image (its keys: bytes, name)"),
        ({"image": "text.png", "max_pixels": 100}, "sets max_pixels for one image or video"),
        (None, "is NoneType"),
        (["a.png"], "is list"),
        (3, "is int"),
        (pixels().astype(float), "an array of float64 with the shape [6, 9, 3]: give uint8"),
        (pixels()[..., 0], "with the shape [6, 9]"),
        (np.zeros((0, 5, 3), np.uint8), "is empty: its size is 5 x 0"),
        (Image.new("RGB", (0, 5)), "is empty: its size is 0 x 5"),
        (png(0, 5), "is damaged"),
    ):
        assert says in refusal(source, tmp_path), source
    with pytest.raises(ImageError, match="^image 2 of 2: there is no image file"):
        list(decode_all([pixels(), "gone.png"], tmp_path, MUCH))
    assert issubclass(ImageError, RowError)


def test_rows_of_a_parquet_file_as_verl_and_datasets_write_it_become_pixels(tmp_path):
    import pyarrow
    import pyarrow.parquet

    first, second = pixels(5), pixels(6, 4, 4)
    Image.fromarray(second).save(tmp_path / "second.png")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>Compare with <image>."}],
            "images": [
                {"bytes": encoded(Image.fromarray(first)), "path": None},
                {"bytes": None, "path": "second.png"},
            ],
        },
        {"prompt": [{"role": "user", "content": "One and one?"}], "images": None},
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    for read in (open_rows(str(path)), read_source(str(path), "prompt", "answer").rows):
        found = illustrated(read[0], read[0]["prompt"])
        assert found.messages == [turn("user", [IMAGE, text("Compare with "), IMAGE, text(".")])]
        for image, expected in zip(decode_all(found.images, tmp_path, MUCH), (first, second), strict=True):
            assert np.array_equal(image, expected)
        plain = illustrated(read[1], read[1]["prompt"])
        assert plain.messages == rows[1]["prompt"] and plain.images == []


def test_rows_of_an_image_column_of_datasets_become_pixels(tmp_path):
    datasets = pytest.importorskip("datasets")
    stored = pixels(7)
    rows = {"images": [[Image.fromarray(stored)]], "prompt": [[turn("user", [IMAGE | {"text": None}, text("Q")])]]}
    data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    data.save_to_disk(str(tmp_path / "set"))
    row = open_rows(f"hf:{tmp_path / 'set'}")[0]
    found = illustrated(row, row["prompt"])
    assert found.messages == [turn("user", [IMAGE, text("Q")])]
    assert np.array_equal(decode(found.images[0], tmp_path, MUCH), stored)
