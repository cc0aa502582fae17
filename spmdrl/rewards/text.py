"""Rewards that compare text: quick and certain to end, so they are called in the process itself."""

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


def to_decimal(text: str) -> Decimal | None:
    """Value of a number as written (`$1,080.50`), or None."""
    try:
        value = Decimal(re.sub(r"[\s$,]", "", text.translate(SIGNS)))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def truth_text(ground_truth: object, may_be_empty: bool = False) -> str:
    """A truth as text, as every grader compares it: a whole number in a column of floats (3.0) is written as one (3).

    Raises ValueError for what is no truth: null, NaN, an infinite number, a list, an object, and, unless
    `may_be_empty`, an empty text, which some response would equal without an answer.
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
        raise ValueError(
            f"first_integer compares with an integer and the truth is {str(item.ground_truth)[:60]!r}: "
            "change --data.answer-column or --reward.function"
        )
    found = NUMBER.search(item.solution.translate(SIGNS))
    value = to_decimal(found.group()) if found else None
    return Reward(float(value == truth), {"format": float(found is not None)})
