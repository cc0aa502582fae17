"""Rewards that compare text or a number with the ground truth, and helper functions for all text rewards.

These rewards are always fast, so each rank calls them directly. `gsm8k` and `gsm8k_flexible` grade the grade-school
maths problems of Cobbe et al. 2021 (https://arxiv.org/abs/2110.14168), whose reference answers end in `#### n`.
"""

import math
import re
from decimal import Decimal, InvalidOperation

from spmdrl.rewards.base import Reward, RewardInput

SIGNS = str.maketrans(dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-"))
"""`str.translate` table that replaces Unicode minus signs and dashes, such as U+2212 and the en dash, by `-`."""
CURRENCY = re.compile(
    r"\\?\$|[\u20ac\u00a3\u00a5\u00a2]|\\(?:euro|pounds|yen|cent|text(?:euro|sterling|yen|cent))(?![A-Za-z])(?:\{\})?"
)
"""Currency signs: dollar, euro, pound, yen and cent."""
NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)")
"""A decimal number with optional minus, dollar sign and thousands separators. In `10-3` it matches 10 and 3, not -3."""
ADVICE = "change --data.answer-column or --reward.function"
_MARKED = re.compile(rf"####\s*({NUMBER.pattern})")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_OPEN_MARK = re.compile(
    r"####[^\n]*$|<answer>(?:(?!</answer>).)*$|```[^`]*$|answer[*_]*\s*(?:is)?\s*:[^\n]*$", re.IGNORECASE | re.DOTALL
)
"""An unclosed answer marker at the end of a text: `####`, `<answer>`, a fence, `Answer:`."""


def to_decimal(text: str) -> Decimal | None:
    """Parse a number as written in text (`$1,080.50`), or return None if the text is not a finite number."""
    try:
        value = Decimal(re.sub(r"[\s$,]", "", text.translate(SIGNS)))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def truth_text(ground_truth: object, may_be_empty: bool = False) -> str:
    """Convert a ground truth to the text that graders compare. A float such as 3.0 becomes `3`.

    Raises ValueError for null, NaN, an infinite number, a list or an object. Empty text also raises ValueError unless
    `may_be_empty`, because an empty response would then be correct.
    """
    if isinstance(ground_truth, float) and math.isfinite(ground_truth):
        text = format(Decimal(repr(ground_truth)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    if ground_truth is None or isinstance(ground_truth, float | list | dict):
        kind = "empty (null)" if ground_truth is None else f"{str(ground_truth)[:60]}, which is not an answer"
        raise ValueError(f"the truth is {kind}: change --data.answer-column, or drop such rows")
    text = str(ground_truth)
    if not text.strip() and not may_be_empty:
        raise ValueError("the truth is empty: change --data.answer-column, or drop such rows")
    return text


def divided(prefill: str) -> tuple[str, str]:
    """Split a reply's prefill (`--data.prefill`) before an answer marker that the prefill leaves open.

    Graders search the response for markers, so the second part is graded together with the response to complete the
    marker. The first part is not graded, because it might repeat numbers from the task.
    """
    fences = [found.start() for found in re.finditer("```", prefill)]
    found = next((m for m in _OPEN_MARK.finditer(prefill) if m.group()[0] != "`" or len(fences) % 2), None)
    box = next(
        (m.start() for m in reversed([*BOX.finditer(prefill)]) if closing(prefill, m.end()) is None), len(prefill)
    )
    at = min(box, found.start() if found else len(prefill))
    return prefill[:at], prefill[at:]


def closing(text: str, start: int = 0, braces: re.Pattern = _BRACES) -> int | None:
    """Return the index of the brace that closes a brace opened before `start`, or None if it is not closed.

    An escaped brace is part of the answer and does not count as an opening or closing brace.
    """
    depth = 1
    for found in braces.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def none(item: RewardInput) -> Reward:
    """Return 0 for every response, for runs where only a reward model or a teacher scores responses."""
    return Reward(0.0)


def environment(item: RewardInput) -> Reward:
    """Return the total of the turn rewards and the final reward from the environment (`--env`), with the parts of the
    final reward (docs/agents.md#rewards).

    Raises ValueError if there is no environment.
    """
    if item.given is None:
        raise ValueError("there is no reward from an environment: set --env")
    return Reward(item.given, dict(item.given_parts))


def exact_match(item: RewardInput) -> Reward:
    """Return 1 if the whole response equals the ground truth, ignoring leading and trailing whitespace."""
    truth = truth_text(item.ground_truth, may_be_empty=True)
    return Reward(float(item.solution.translate(SIGNS).strip() == truth.translate(SIGNS).strip()))


def first_integer(item: RewardInput) -> Reward:
    """Return 1 if the first number in the response equals the integer ground truth. The part `format` is 1 if there is
    a number.
    """
    truth = to_decimal(truth_text(item.ground_truth))
    if truth is None or truth != truth.to_integral_value():
        wrong = str(item.ground_truth)[:60]
        raise ValueError(f"first_integer compares with an integer, but the truth is {wrong!r}: {ADVICE}")
    found = NUMBER.search(item.solution.translate(SIGNS))
    value = to_decimal(found.group()) if found else None
    return Reward(float(value == truth), {"format": float(found is not None)})


def _gsm8k(item: RewardInput) -> dict[str, float]:
    truth = to_decimal(truth_text(item.ground_truth).rsplit("####", 1)[-1].strip().rstrip("."))
    if truth is None:
        raise ValueError(f"there is no number in the truth {str(item.ground_truth)[-60:]!r}: {ADVICE}")
    solution = item.solution.translate(SIGNS)
    marked, numbers = _MARKED.findall(solution), [m.group() for m in NUMBER.finditer(solution)]
    strict, flexible = (bool(found) and to_decimal(found[-1]) == truth for found in (marked, numbers))
    return {"strict": float(strict), "flexible": float(flexible), "format": float(bool(marked))}


def gsm8k(item: RewardInput) -> Reward:
    """Return 1 if the number after the last `####` equals the ground truth, which is a number or a GSM8K solution
    ending in `#### n`. The part `flexible` is the score of `gsm8k_flexible`. The part `format` is 1 if there is a
    `#### n`.
    """
    found = _gsm8k(item)
    return Reward(found.pop("strict"), found)


def gsm8k_flexible(item: RewardInput) -> Reward:
    """Return 1 if the last number in the response equals the ground truth, which has the same forms as for `gsm8k`.
    The part `strict` is the score of `gsm8k`. The part `format` is 1 if there is a `#### n`.
    """
    found = _gsm8k(item)
    return Reward(found.pop("flexible"), found)
