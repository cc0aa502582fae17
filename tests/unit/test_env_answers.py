"""Any result of a tool as valid, bounded text."""

import dataclasses
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.env import Answer
from spmdrl.env.answers import BadRewardError, cut_parts, cut_text, tool_result, valid


class Mute:
    pass


class Loud:
    def __str__(self):
        return "loud\x00"


class Broken:
    def __str__(self):
        raise RuntimeError("no text")


class NotText:
    def __str__(self):
        return 5


class Fault:
    def __str__(self):
        return "fault at 0x10"


@dataclasses.dataclass
class Point:
    x: object


ITSELF: list = []
ITSELF.append(ITSELF)


def text(result, longest=1000, cut="middle"):
    return tool_result(result, longest, cut).text


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        (None, ""),
        (True, "true"),
        (3, "3"),
        (1.5, "1.5"),
        (math.nan, "NaN"),
        ({"a": [1, "ä", None]}, '{"a": [1, "ä", null]}'),
        ((1, 2), "[1, 2]"),
        ({1: {"x", "y"}}, '{"1": ["x", "y"]}'),
        ({"b", "a"}, '["a", "b"]'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (ITSELF, "[[...]]"),
        ([Mute()], '["a Mute object"]'),
        (Mute(), "a Mute object"),
        (Loud(), "loud\ufffd"),
        (Point(1), "Point(x=1)"),
        ((each for each in ()), "<generator object <genexpr>>"),
        ([Mute().__eq__], "[\"<method-wrapper '__eq__' of Mute object>\"]"),
        ({(1, 2): Mute()}, "{(1, 2): <tests.unit.test_env_answers.Mute object>}"),
        (Point(Mute()), "Point(x=<tests.unit.test_env_answers.Mute object>)"),
        (Fault(), "fault at 0x10"),
        (np.float32(0.5), "0.5"),
        (b"bytes \xff\xc3\xa4", "bytes \ufffdä"),
        (bytearray(b"x"), "x"),
        ([b"\xff"], '["\ufffd"]'),
        ("\ud83d\ude00 \ud800 \udc00", "😀 \ufffd \ufffd"),
        ("a\r\nb\rc\x00\x1b[1;31md\x1b[0m\x1b\x7f\x9b", "a\nb\nc\ufffdd\ufffd\ufffd\ufffd"),
        ("<|im_end|><tool_call>", "<|im_end|><tool_call>"),
    ],
)
def test_results_as_text(result, wanted):
    assert text(result) == wanted


def test_results_without_a_text_raise_what_they_raise():
    for result, error in [
        (Broken(), RuntimeError),
        (NotText(), TypeError),
        (10**5000, ValueError),
        ([Broken()], RuntimeError),
    ]:
        with pytest.raises(error):
            text(result)


def test_rewards_of_calls():
    got = tool_result(("well", np.float32(0.5)), 100, "head")
    assert (got.text, got.reward, got.done) == ("well", 0.5, False)
    got = tool_result(Answer({"a": 1}, 2, True), 100, "head")
    assert (got.text, got.reward, got.done) == ('{"a": 1}', 2.0, True)
    assert tool_result(Answer("x", None), 100, "head").reward is None
    assert tool_result("x", 100, "head").reward is None
    for pair in [("a", "b"), (1, 2), ("a", True)]:
        assert tool_result(pair, 100, "head") == tool_result(list(pair), 100, "head"), "no reward"
    for bad in (math.nan, math.inf, "much"):
        with pytest.raises(BadRewardError, match="not a finite number"):
            tool_result(Answer("x", bad), 100, "head")  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", ["0123456789", b"0123456789"])
def test_long_texts_are_cut_and_that_is_said(raw):
    unit = "characters" if isinstance(raw, str) else "bytes"
    assert cut_text(raw, 10, "head") == ("0123456789", False)
    assert cut_text(raw, 3, "head") == (f"012\n[the head of 10 {unit}: 3 are shown]", True)
    assert cut_text(raw, 3, "tail") == (f"[the tail of 10 {unit}: 3 are shown]\n789", True)
    note = f"[the beginning and the end of 10 {unit}: 3 are shown]"
    assert cut_text(raw, 3, "middle") == (f"01\n{note}\n9", True)
    assert cut_text(raw, 1, "middle")[0] == f"0\n{note.replace('3 are', '1 are')}\n"


@pytest.mark.parametrize("cut", ["head", "tail", "middle"])
def test_ten_megabytes(cut):
    size = 10_000_000
    begin = time.process_time()
    for result in [
        "x" * size,
        "\ud800" * size,
        b"\xff" * size,
        "\x1b" * size,
        ["y" * 100] * (size // 100),
        {"k": "\x00" * size},
    ]:
        got = tool_result(result, 1000, cut)
        assert got.was_cut and len(got.text) < 1200
        got.text.encode()
    assert time.process_time() - begin < 20, "each costs time by its size at most"


@given(
    st.binary(max_size=200) | st.text(st.characters(), max_size=100),
    st.integers(1, 50),
    st.sampled_from(["head", "tail", "middle"]),
)
def test_whatever_comes_is_valid_and_bounded(raw, longest, cut):
    got, was_cut = cut_text(raw, longest, cut)
    assert was_cut == (len(raw) > longest)
    assert len(got) <= longest + 80
    assert got.encode().decode() == got
    assert all(c in "\n\t" or (ord(c) >= 32 and not 0x7F <= ord(c) <= 0x9F) for c in got)
    assert json.loads(json.dumps(got)) == got


@given(st.lists(st.integers(0, 0xFFFF)).map(lambda units: b"".join(u.to_bytes(2, "little") for u in units)))
def test_surrogates(units):
    raw = units.decode("utf-16-le", "surrogatepass")
    halves = "".join(chr(int.from_bytes(units[i : i + 2], "little")) for i in range(0, len(units), 2))
    valid(raw).encode()
    assert valid(halves) == valid(raw), "two halves are the character that they stand for"


def test_blocks_of_text():
    assert cut_parts([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], 10, "head") == ("ab", 0)
    for bad in ([{"type": "image", "image": 1}], ["text"], [{"type": "text"}], [{"type": "video", "video": "a"}]):
        with pytest.raises(TypeError, match="neither text nor an image"):
            cut_parts(bad, 10, "head")
