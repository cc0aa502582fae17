r"""The reward `math`, which extracts a response's answer, normalises it and compares it with the ground truth.

The answer is in `\boxed{...}`, in the last `Answer: ...` line, or in prose. The answer is compared as text, then as a
number, then symbolically with math-verify (https://github.com/huggingface/Math-Verify), which can take seconds for
`9^{9^{9^9}}`. math-verify's timeouts are disabled because they rely on alarm signals, which only work in the main
thread. Instead, this reward runs in the pool, whose processes can be killed.
"""

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

from spmdrl.rewards import symbolic
from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.text import BOX, CURRENCY, SIGNS, closing, truth_text
from spmdrl.rewards.units import differ, money

_ANSWER_LINE = re.compile(r"(?i)answer[*_]*\s*(?:is)?\s*[*_]*:([*_`\s]*)([^\n]+)")
_BOLD_END = re.compile(r"(?<=[^\s^*_`])(?:\*\*|__|`)[*_`]*(?=[\s.,;:!)]|$)")
_ITALIC_END = re.compile(r"(?<=[^\s^*_`])[*_](?=[\s.,;:!)]|$)")
_BARE_BRACES = re.compile(r"(?<!\\)[{}]")
_DELIMITED = re.compile(r"\\\[(.*)\\\]|\\\((.*)\\\)|\$+([^$]*)\$+", re.DOTALL)
_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|pi|left|right|,|!|;|:)")
_NUMBER = re.compile(r"(-?)(\d{1,100}|\d{1,3}(?:,\d{3}){1,30})?(\.\d{1,100})?")
_FRACTION = re.compile(
    r"(?P<sign>-?)(?:(?P<whole>\d{1,100})(?: |(?=\\)))?"
    r"(?:\\frac\{(?P<above>\d{1,100})\}\{(?P<below>\d{1,100})\}|(?P<over>\d{1,100})/(?P<under>\d{1,100}))"
)
_LOOKS = re.compile(r"\\(?:text|math(?!cal|frak|scr)|operatorname|mbox|bold|bm)[a-z]{0,6}\*?\s*\{([^{}]*)\}")
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Z][a-z]{3,}|[A-Z]{4,}|(?i:yes|no|odd|dne|all|any|one|two|six|ten|red))(?![A-Za-z])"
)
"""A word whose case is ignored: four letters or more, or one of the listed words."""
_TAIL = 1000
"""Number of characters at the end of a response that math-verify searches if no answer is marked."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, or None if there is none."""
    for opened in reversed([*BOX.finditer(text)]):
        end = closing(text, opened.end(), _BARE_BRACES)
        if end is not None:
            return text[opened.end() : end].strip()
    return None


def _extract(solution: str) -> tuple[str, str]:
    r"""Extract a response's answer and its form: `box` (the last box), `line` (the last answer line) or `prose`."""
    boxed = last_boxed(solution)
    if boxed is not None:
        return boxed, "box"
    lines = _ANSWER_LINE.findall(solution)
    if lines:
        return _plain(*lines[-1]), "line"
    return solution[-_TAIL:].strip(), "prose"


def _plain(opened: str, text: str) -> str:
    """Strip Markdown emphasis and LaTeX delimiters around the text of an answer line.

    opened: Markdown characters between the colon and the text, as in `Answer: **540**` and `**Answer:** 540`.
    """
    text = _BOLD_END.sub("", text)
    if set(opened) & {"*", "_"}:
        text = _ITALIC_END.sub("", text, count=1)
    text = text.strip()
    inside = _DELIMITED.fullmatch(text.rstrip(" ."))
    return next(part for part in inside.groups() if part is not None).strip() if inside else text


def _sides(text: str) -> list[str]:
    """Split a chain of equations such as `x = 2 * 270 = 540` into its sides; any other text, or a list, is one side."""
    depth, parts = 0, [""]
    for before, char, after in zip(" " + text, text, text[1:] + " ", strict=False):
        depth += (char in "{([") - (char in "])}")
        if depth == 0 and char in ",;" and after.isspace():
            return [text]
        if depth == 0 and char == "=" and before not in "<>!:=" and after != "=":
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _contradicts(text: str) -> bool:
    """Return whether two adjacent sides of a chain of equations differ in value, as in `539 = 540`.

    Only sides without names, units and number bases are compared. A decimal side equals any value that rounds to it.
    """
    values = []
    for side in _sides(text):
        if side and not re.search(r"[A-Za-z%$\\_]", _COMMAND.sub("", side)):
            value = symbolic.read(side)
            if value is None:
                continue
            digits = re.fullmatch(r"-?\d+\.(\d+)", side)
            try:
                values.append((float(value.expression), 0.5 * 10.0 ** -len(digits[1]) if digits else 0.0))
            except (TypeError, ValueError, OverflowError):
                continue
    return any(abs(a - b) > 1e-9 * max(abs(a), abs(b)) + max(r, s) for (a, r), (b, s) in pairwise(values))


def _simplify(text: str) -> str:
    r"""Simplify an answer: drop spaces, `$`, `\left` and a final dot, and replace `\dfrac` by `\frac`.

    The content of `\text{...}` is kept. Words are lowercased; letters that are variables keep their case.
    """
    text = text.translate(SIGNS).strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    for _ in range(2):
        text = _LOOKS.sub(r"\1", text)
    text = CURRENCY.sub("", text).replace(r"\%", "%").strip()
    text = _WORD.sub(lambda m: m[0].lower(), text)
    # Keep a space between two digits unless it separates thousands, because `3 1/2` is not 31/2.
    text = re.sub(r"(?<=\d)\s+(?=\d{3}(?!\d))|(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"\s+", " ", text).rstrip(".")


def _to_number(text: str) -> Fraction | None:
    """Return the exact value of simplified text if it is a number, fraction or mixed number, else None."""
    if (m := _NUMBER.fullmatch(text)) and (m[2] or m[3]):
        return Fraction(m[1] + (m[2] or "0").replace(",", "") + (m[3] or ""))
    if m := _FRACTION.fullmatch(text):
        below = int(m["below"] or m["under"])
        if not below:
            return None
        value = int(m["whole"] or 0) + Fraction(int(m["above"] or m["over"]), below)
        return -value if m["sign"] else value
    return None


def _equal(truth: str, answer: str, form: str) -> bool:
    """Return whether an answer has the same value or the same simplified text as the ground truth.

    form: `box`, `line` (the answer can contain some prose) or `prose`.
    """
    gold = symbolic.read(truth)
    found = symbolic.read(answer) if form != "prose" else None
    if found is None and form != "box":
        numbers = _to_number(_simplify(truth)) is not None
        answer = symbolic.mentioned(answer, numbers, form == "line")
        found = symbolic.read(answer)
    return symbolic.same(gold, found) or _simplify(answer) == _simplify(truth)


def math_reward(item: RewardInput) -> Reward:
    r"""Return 1 if the answer equals the ground truth as text, as a number, or according to math-verify. The answer is
    the last `\boxed{...}`, else the last `Answer: ...` line, else the end of the response. The part `format` is 1 if
    the answer is in a box or such a line.
    """
    whole = truth_text(item.ground_truth)
    boxed = last_boxed(whole)
    raw_truth = whole if boxed is None else boxed
    truth = _simplify(truth_text(raw_truth))
    raw, form = _extract(item.solution)
    answer, parts = _simplify(raw), {"format": float(form != "prose")}
    if not answer or (form != "prose" and differ(money(raw), money(raw_truth))):
        return Reward(0.0, parts)
    if answer == truth:
        return Reward(1.0, parts)
    if form != "prose" and _contradicts(raw):
        return Reward(0.0, parts)
    a, b = _to_number(answer), _to_number(truth)
    if a is not None and b is not None:
        rounded = ("." in answer) != ("." in truth) and 1 not in (a.denominator, b.denominator)
        return Reward(float(abs(a - b) <= (symbolic.DECIMAL * max(abs(a), abs(b)) if rounded else 0)), parts)
    equal = _equal(raw_truth, raw, form)
    if form != "prose" and not equal and "=" not in truth and len(chain := _sides(raw)) > 1:
        # Compare only the last side of a chain of equations such as `45 \text{ ft} = 540 \text{ in}`.
        equal = _equal(raw_truth, chain[-1], form)
    return Reward(float(equal), parts)


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Load the reward. Run slow imports and a first parse here, so that they do not count as grading time."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # otherwise each call warns that timeouts are disabled
    _equal(r"\frac{1}{2}", "x+1", "line")
    return math_reward
