"""Rewards that compare text: quick and certain to end, so they are called in the process itself."""

import re
from decimal import Decimal, InvalidOperation

from spmdrl.rewards.base import Reward, RewardInput

NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""A decimal number, with an optional minus, dollar sign and thousands commas. `10-3` holds 10 and 3, not -3."""


def to_decimal(text: str) -> Decimal | None:
    """Value of a number as written (`$1,080.50`), or None."""
    try:
        return Decimal(re.sub(r"[\s$,]", "", text))
    except InvalidOperation:
        return None


def truth_text(ground_truth: object) -> str:
    """A truth as text. Raises ValueError for an empty one, which some response would equal without an answer."""
    text = "" if ground_truth is None else str(ground_truth)
    if not text.strip():
        raise ValueError("the truth is empty: change --data.answer-column")
    return text


def none(item: RewardInput) -> Reward:
    """0 for every response, for runs in which a model or a teacher scores it."""
    return Reward(0.0)


def environment(item: RewardInput) -> Reward:
    """The rewards that the environment gave, with the parts of the final one.

    Raises ValueError where no environment was there.
    """
    if item.given is None:
        raise ValueError("no environment gave a reward: name one by --env")
    return Reward(item.given, dict(item.given_parts))


def exact_match(item: RewardInput) -> Reward:
    """1 when the response, stripped, is the truth, stripped."""
    return Reward(float(item.solution.strip() == str(item.ground_truth).strip()))


def first_integer(item: RewardInput) -> Reward:
    """1 when the first number in the response is the truth, an integer. Part `format`: there is a number."""
    truth = to_decimal(str(item.ground_truth))
    if truth is None or truth != truth.to_integral_value():
        raise ValueError(
            f"first_integer compares with an integer and the truth is {str(item.ground_truth)[:60]!r}: "
            "change --data.answer-column or --reward.function"
        )
    found = NUMBER.search(item.solution)
    value = to_decimal(found.group()) if found else None
    return Reward(float(value == truth), {"format": float(found is not None)})
