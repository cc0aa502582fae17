r"""Mathematical answers: `\boxed{...}`, or a last line `Answer: ...`, compared as text, as a number, then symbolically.

The symbolic part is math-verify (https://github.com/huggingface/Math-Verify), which can burn seconds on `9^{9^{9^9}}`
and whose own time limits want the main thread of a process that has no other alarm: they are off, and this runs in the
pool, whose processes can be killed.
"""

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from spmdrl.rewards.base import Reward, RewardInput

_ANSWER_LINE = re.compile(r"(?i)answer[*_]*\s*(?:is)?\s*[*_]*:([*_`\s]*)([^\n]+)")
_BOLD_END = re.compile(r"(?<=[^\s^*_`])(?:\*\*|__|`)[*_`]*(?=[\s.,;:!)]|$)")
_ITALIC_END = re.compile(r"(?<=[^\s^*_`])[*_](?=[\s.,;:!)]|$)")
_DELIMITED = re.compile(r"\\\[(.*)\\\]|\\\((.*)\\\)|\$+([^$]*)\$+", re.DOTALL)
_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|pi|left|right|,|!|;|:)")
_NUMBER = re.compile(r"(-?)(\d{1,100}|\d{1,3}(?:,\d{3}){1,30})(\.\d{1,100})?")
_FRACTION = re.compile(r"(-?)(?:\\frac\{(\d{1,100})\}\{(\d{1,100})\}|(\d{1,100})/(\d{1,100}))")
_TAIL = 1000
"""Characters at the end of a response without a marked answer in which math-verify looks for one."""


def last_boxed(text: str) -> str | None:
    r"""Content of the last closed `\boxed{...}` or `\fbox{...}`, braces inside it balanced; None when there is none."""
    end = len(text)
    while True:
        start = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        if start < 0:
            return None
        opened = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
        depth = 1
        for i in range(opened.end() if opened else len(text), len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0 and opened:
                    return text[opened.end() : i].strip()
        end = start


def extract(solution: str) -> tuple[str, bool]:
    r"""The answer in a response, and whether it was marked: last `\boxed{}`, last `Answer: ...` line, or the tail."""
    boxed = last_boxed(solution)
    if boxed is not None:
        return boxed, True
    lines = _ANSWER_LINE.findall(solution)
    if lines:
        return plain(*lines[-1]), True
    return solution[-_TAIL:].strip(), False


def plain(opened: str, text: str) -> str:
    """An answer line without Markdown emphasis and LaTeX delimiters around the whole of it.

    opened: marks that stood before it, as in `**540**` and in `**Answer:** 540`.
    """
    text = _BOLD_END.sub("", text)
    if set(opened) & {"*", "_"}:
        text = _ITALIC_END.sub("", text, count=1)
    text = text.strip()
    inside = _DELIMITED.fullmatch(text.rstrip(" ."))
    return next(part for part in inside.groups() if part is not None).strip() if inside else text


def sides(text: str) -> list[str]:
    """Sides of a chain of equations, `x = 2 * 270 = 540`; the text alone where it is no chain, or a list of several."""
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


def contradicts(text: str) -> bool:
    """Tells whether a text is a chain of equations whose sides differ in value, as `539 = 540`, which is no answer.

    Only sides without names, units and number bases are looked at; a decimal equals what rounds to it.
    """
    values = []
    for side in sides(text):
        if side and not re.search(r"[A-Za-z%$\\_]", _COMMAND.sub("", side)):
            parsed = _parse(side, True)
            digits = re.fullmatch(r"-?\d+\.(\d+)", side)
            try:
                values.append((float(parsed[0]), 0.5 * 10.0 ** -len(digits[1]) if digits else 0.0))
            except (TypeError, ValueError, OverflowError, IndexError):
                continue
    return any(abs(a - b) > 1e-9 * max(abs(a), abs(b)) + max(r, s) for (a, r), (b, s) in pairwise(values))


def simplify(text: str) -> str:
    r"""Normal form of an answer with several spellings: no spaces, `$`, `\left`, `\dfrac`, `\text{}`, final dot."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|\s)", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\%", "%")
    return re.sub(r"\s+", "", text).rstrip(".")


def to_number(text: str) -> Fraction | None:
    """Exact value of a plain number or fraction (in simplified text), else None."""
    if m := _NUMBER.fullmatch(text):
        return Fraction(m[1] + m[2].replace(",", "") + (m[3] or ""))
    if m := _FRACTION.fullmatch(text):
        below = int(m[3] or m[5])
        return Fraction(int(m[1] + (m[2] or m[4])), below) if below else None
    return None


@lru_cache(maxsize=1024)  # the samples of a prompt share their truth, and often their answers
def _parse(text: str, bare: bool) -> list:
    """Expressions in a text. bare: the text is one expression alone, not prose that holds some."""
    from math_verify import parse

    # math-verify finds LaTeX by its delimiters: with them a bare `\frac{1}{2}` is read too
    found = parse("$" + text.strip("$ ") + "$", parsing_timeout=0) if bare else []
    return found or parse(text, parsing_timeout=0)


def _symbolically_equal(truth: str, answer: str, bare: bool) -> bool:
    from math_verify import verify

    try:
        gold, found = _parse(truth, True), _parse(answer, bare)
        return bool(gold and found and verify(gold, found, timeout_seconds=None))
    except Exception:  # sympy on an odd answer may raise anything (RecursionError too): then it is not equal
        return False


def math_reward(item: RewardInput) -> Reward:
    r"""1 when the answer equals the truth. Part `format`: the answer was marked (`\boxed{}` or `Answer:`)."""
    truth_text = str(item.ground_truth)
    boxed = last_boxed(truth_text)
    raw_truth = truth_text if boxed is None else boxed
    truth = simplify(raw_truth)
    if not truth:
        raise ValueError("the truth is empty: change --data.answer-column")
    raw, marked = extract(item.solution)
    answer, parts = simplify(raw), {"format": float(marked)}
    if answer == truth:
        return Reward(1.0, parts)
    if not answer:
        return Reward(0.0, parts)
    if marked and contradicts(raw):
        return Reward(0.0, parts)
    a, b = to_number(answer), to_number(truth)
    if a is not None and b is not None:
        return Reward(float(a == b), parts)
    equal = _symbolically_equal(raw_truth, raw, marked)
    if marked and not equal and "=" not in truth and len(chain := sides(raw)) > 1:
        # `45 \text{ ft} = 540 \text{ in}`
        equal = _symbolically_equal(raw_truth, chain[-1], marked)
    return Reward(float(equal), parts)


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Give the reward after its imports and first parse, which must not count as time of the first grading."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # one warning a call that its limits are off
    _symbolically_equal(r"\frac{1}{2}", "x+1", bare=True)
    return math_reward
