"""Converts any tool result to valid text of bounded length, in time linear in the result's size.

A result that shows images becomes a list of parts, whose texts are bounded in the same way.
"""

import json
import math
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from spmdrl.data.scores import as_number
from spmdrl.env.pictures import encoded, parts_of

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Terminal control sequences (ECMA-48, CSI), such as colour codes."""
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The memory address in the `repr` of a Python object, which differs between processes."""


class BadRewardError(ValueError):
    """The environment returned a reward that is not a finite number."""


@dataclass(frozen=True)
class Answer:
    """A tool result that can also give a reward for the call, or end the episode (`done`)."""

    text: Any = ""
    """Text, images (`pictures.py`), or any other value that a tool can return."""
    reward: float | None = 0.0
    done: bool = False


@dataclass(frozen=True)
class History:
    """Messages that `step` returns to replace the conversation so far, for example with a summary."""

    messages: Any
    """All messages of the new conversation. The policy answers the last message. A string becomes a user message."""


@dataclass(frozen=True)
class ToolResult:
    """A tool's result: the content for the model, the reward, whether the episode ends, and whether text was cut."""

    text: str | list[dict[str, Any]]
    """Text, or parts as in `Reply.messages` if images are shown."""
    reward: float | None = None
    done: bool = False
    was_cut: bool = False


def tool_result(result: object, longest: int, cut: str) -> ToolResult:
    """Return a tool's result as text. Text longer than `longest` characters is truncated, and a note marks the cut.

    result: an `Answer`, a pair `(text, reward)`, or any value that `Answer.text` can have: text, bytes (UTF-8), a PIL
    image, a list of texts and images, a JSON value, or another object. Other objects are converted by `str()`, whose
    errors are not caught. cut: the part of a longer text to keep, `head` (the beginning), `tail` (the end) or `middle`
    (both ends).

    Raises:
        BadRewardError: the reward is not a finite number.
        BrokenError: an image cannot be used.
    """
    reward, done = None, False
    if isinstance(result, Answer):
        result, reward, done = result.text, result.reward, bool(result.done)
    elif isinstance(result, tuple) and len(result) == 2 and _is_reward(result[1]) and _is_content(result[0]):
        result, reward = result
    if parts_of(result, exact=True) is not None:
        content, cuts = cut_parts(encoded(result), longest, cut)
        return ToolResult(content, finite(reward), done, cuts > 0)
    text, was_cut = cut_text(raw_text(result), longest, cut)
    return ToolResult(text, finite(reward), done, was_cut)


def finite(reward: object) -> float | None:
    """Convert a reward to a float; None stays None. Raises BadRewardError if the reward is not a finite number."""
    if reward is None:
        return None
    number = as_number(reward)
    if number is None or not math.isfinite(number):
        raise BadRewardError(f"gave the reward {str(reward)[:50]}, which is not a finite number")
    return number


def raw_text(value: object) -> str | bytes:
    """Return a value as text, without limiting its length or characters. The `str()` of an object may raise."""
    if value is None:
        return ""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if value is True or value is False or isinstance(value, int | float | dict | list | tuple):
        try:
            return json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError):  # json refuses some keys, cycles, and numbers with too many digits
            return _ADDRESS.sub("", str(value))
    plain = _plain(value)
    return plain if isinstance(plain, str) else raw_text(plain)


def cut_text(raw: str | bytes, longest: int, cut: str) -> tuple[str, bool]:
    """Return `raw` as valid text, and whether it was truncated because it is longer than `longest`.

    A note in the text tells the model about the cut. `raw` is cut before it is decoded and cleaned, so the run time
    depends only on `longest`. cut: as in `tool_result`.
    """
    if len(raw) <= longest:
        return valid(raw), False
    unit = "characters" if isinstance(raw, str) else "bytes"
    size, half = len(raw), longest // 2
    note = f"[the {cut if cut != 'middle' else 'beginning and the end'} of {size} {unit}: {longest} are shown]"
    if cut == "head":
        return f"{valid(raw[:longest])}\n{note}", True
    if cut == "tail":
        return f"{note}\n{valid(raw[size - longest :])}", True
    return f"{valid(raw[: longest - half])}\n{note}\n{valid(raw[size - half :])}", True


def valid(raw: str | bytes) -> str:
    """Return text that can be encoded as UTF-8 and has no control characters except tabs and newlines.

    Invalid UTF-8, lone surrogates and control characters become U+FFFD. Terminal colour codes are removed.
    """
    if isinstance(raw, bytes):
        text = raw.decode("utf-8", "replace")
    else:  # a pair of surrogates becomes the character that it encodes
        text = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return CONTROLS.sub("\ufffd", text)


def cut_parts(parts: list[Any], longest: float, cut: str) -> tuple[str | list[dict[str, Any]], int]:
    """Return the parts of a content with valid text, and the number of truncated texts.

    Without images, the result is the joined text. All texts together have at most `longest` characters, and images do
    not count. parts: texts, and images as data URLs (`pictures.encoded`). cut: as in `tool_result`.

    Raises:
        TypeError: a part is neither.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "image") or not isinstance(part.get(kind), str):
            raise TypeError(f"a message has a part of type {kind} that is neither text nor an image with its source")
    if all(part["type"] == "text" for part in parts):
        raw = "".join(part["text"] for part in parts)
        text, was_cut = cut_text(raw, int(min(longest, len(raw))), cut)
        return text, int(was_cut)
    out, cuts = [], 0
    for part in parts:
        if part["type"] == "image":
            out.append({"type": "image", "image": part["image"]})
        elif raw := part["text"]:
            text, was_cut = cut_text(raw, int(min(longest, len(raw))), cut)
            out.append({"type": "text", "text": text})
            longest, cuts = max(longest - len(raw), 0), cuts + was_cut
    return out, cuts


def _is_content(value: object) -> bool:
    return isinstance(value, str) or parts_of(value, exact=True) is not None


def _is_reward(value: object) -> bool:
    return not isinstance(value, bool | str) and as_number(value) is not None


def _plain(value: Any) -> Any:
    """Convert an object to a JSON value or text that is the same in every process, unless its own `__str__` differs."""
    if isinstance(value, Set):  # the order of a set differs between processes
        return sorted(value, key=str)
    if isinstance(value, bytes | bytearray):
        return valid(bytes(value))
    if type(value).__str__ is not object.__str__:
        return str(value)
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__name__} object"  # the default repr contains the memory address
    return _ADDRESS.sub("", repr(value))
