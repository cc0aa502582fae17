"""Rewards that compare a text or a number with the truth, and what graders of text share.

They are quick and certain to end, so the rank's own process calls them. `gsm8k` and `gsm8k_flexible` grade the
grade-school maths of Cobbe et al. 2021 (https://arxiv.org/abs/2110.14168), whose truths end in `#### n`.
"""

import math
import re
from decimal import Decimal, InvalidOperation

from spmdrl.rewards.base import Reward, RewardInput

SIGNS = str.maketrans(dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-"))
"""Characters that stand for a minus, such as U+2212 and the en dash -> `-`, for `str.translate`."""
CURRENCY = re.compile(
    r"\\?\$|[\u20ac\u00a3\u00a5\u00a2]|\\(?:euro|pounds|yen|cent|text(?:euro|sterling|yen|cent))(?![A-Za-z])(?:\{\})?"
)
"""Signs of currencies: dollar, euro, pound, yen and cent."""
NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)")
"""A decimal number, with an optional minus, dollar sign and thousands commas. `10-3` holds 10 and 3, not -3."""
ADVICE = "change --data.answer-column or --reward.function"
_MARKED = re.compile(rf"####\s*({NUMBER.pattern})")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_OPEN_MARK = re.compile(
    r"####[^\n]*$|<answer>(?:(?!</answer>).)*$|```[^`]*$|answer[*_]*\s*(?:is)?\s*:[^\n]*$", re.IGNORECASE | re.DOTALL
)
"""A mark of an answer, other than a box, that is open at the end of a text: `####`, `<answer>`, a fence, `Answer:`."""


def to_decimal(text: str) -> Decimal | None:
    """Return the value of a number as written (`$1,080.50`), or None."""
    try:
        value = Decimal(re.sub(r"[\s$,]", "", text.translate(SIGNS)))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def truth_text(ground_truth: object, may_be_empty: bool = False) -> str:
    """Return a truth as the text that graders compare: 3.0, a whole number in a column of floats, is `3`.

    Raises ValueError for null, NaN, an infinite number, a list, an object, and, unless `may_be_empty`, an empty text,
    which a response without an answer could equal.
    """
    if isinstance(ground_truth, float) and math.isfinite(ground_truth):
        text = format(Decimal(repr(ground_truth)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    if ground_truth is None or isinstance(ground_truth, float | list | dict):
        kind = "empty (null)" if ground_truth is None else f"{str(ground_truth)[:60]}, which is no answer"
        raise ValueError(f"the truth is {kind}: change --data.answer-column, or drop such rows")
    text = str(ground_truth)
    if not text.strip() and not may_be_empty:
        raise ValueError("the truth is empty: change --data.answer-column, or drop such rows")
    return text


def divided(prefill: str) -> tuple[str, str]:
    """Divide the start of a reply (`--data.prefill`) where it opens the mark of an answer.

    Graders look for marks in a response. They read the open mark with it, so that the text after an open box is an
    answer; of the part before, which may repeat the numbers of a task, they read nothing.
    """
    fences = [found.start() for found in re.finditer("```", prefill)]
    found = next((m for m in _OPEN_MARK.finditer(prefill) if m.group()[0] != "`" or len(fences) % 2), None)
    box = next(
        (m.start() for m in reversed([*_BOX.finditer(prefill)]) if closing(prefill, m.end()) is None), len(prefill)
    )
    at = min(box, found.start() if found else len(prefill))
    return prefill[:at], prefill[at:]


def closing(text: str, start: int = 0, braces: re.Pattern = _BRACES) -> int | None:
    """Return the place of the brace that closes one before `start`; None: it stays open.

    Escaped braces are characters of the answer: they neither open nor close anything.
    """
    depth = 1
    for found in braces.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def none(item: RewardInput) -> Reward:
    """0 for every response, for runs in which a model or a teacher scores it."""
    return Reward(0.0)


def environment(item: RewardInput) -> Reward:
    """The rewards that the environment of `--env` gave, turn by turn and at the end, with the parts of the final one
    (docs/agents.md#rewards).

    Raises ValueError where no environment was there.
    """
    if item.given is None:
        raise ValueError("no environment gave a reward: name one by --env")
    return Reward(item.given, dict(item.given_parts))


def exact_match(item: RewardInput) -> Reward:
    """1 if the whole response is the truth, spaces around it apart."""
    truth = truth_text(item.ground_truth, may_be_empty=True)
    return Reward(float(item.solution.translate(SIGNS).strip() == truth.translate(SIGNS).strip()))


def first_integer(item: RewardInput) -> Reward:
    """1 if the first number equals the truth, an integer. Part `format`: there is a number."""
    truth = to_decimal(truth_text(item.ground_truth))
    if truth is None or truth != truth.to_integral_value():
        wrong = str(item.ground_truth)[:60]
        raise ValueError(f"first_integer compares with an integer and the truth is {wrong!r}: {ADVICE}")
    found = NUMBER.search(item.solution.translate(SIGNS))
    value = to_decimal(found.group()) if found else None
    return Reward(float(value == truth), {"format": float(found is not None)})


def _gsm8k(item: RewardInput) -> dict[str, float]:
    truth = to_decimal(truth_text(item.ground_truth).rsplit("####", 1)[-1].strip().rstrip("."))
    if truth is None:
        raise ValueError(f"no number to compare with in the truth {str(item.ground_truth)[-60:]!r}: {ADVICE}")
    solution = item.solution.translate(SIGNS)
    marked, numbers = _MARKED.findall(solution), [m.group() for m in NUMBER.finditer(solution)]
    strict, flexible = (bool(found) and to_decimal(found[-1]) == truth for found in (marked, numbers))
    return {"strict": float(strict), "flexible": float(flexible), "format": float(bool(marked))}


def gsm8k(item: RewardInput) -> Reward:
    """1 if the number behind the last `####` equals the truth: a number, or GSM8K's answer that ends in `#### n`.
    Parts: `flexible`, the score of `gsm8k_flexible`; `format`, there is a `#### n`.
    """
    found = _gsm8k(item)
    return Reward(found.pop("strict"), found)


def gsm8k_flexible(item: RewardInput) -> Reward:
    """1 if the last number equals the truth, which is as for `gsm8k`. Parts: `strict`, the score of `gsm8k`;
    `format`, there is a `#### n`.
    """
    found = _gsm8k(item)
    return Reward(found.pop("flexible"), found)
