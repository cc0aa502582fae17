r"""The reward `numeric`, which compares the last number in a response with the ground truth within a tolerance.

If there is a `\boxed{...}`, only the last box is searched for the number. Numbers can be written as `-1,234.5`,
`1.2e-3`, `1.2 \times 10^{-3}`, `3/4` or `\frac{3}{4}`. Units after a number, including `%`, are ignored. The row's
`extra_info` can set `tolerance` (relative to the ground truth) and `absolute_tolerance`; the larger one applies.
"""

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import last_box
from spmdrl.rewards.text import ADVICE, SIGNS, truth_text

TOLERANCE = 1e-6
"""Default relative tolerance."""
TAIL = 1000
"""Number of characters at the end of a text that are searched for the last number."""
MOST_DIGITS = 9
"""Maximum number of digits in an exponent; a number with a longer exponent is never correct."""
_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?:(?<![\d)}}\w])[-+]\s?)?)(?:"
    rf"\\[dt]?frac\s?\{{(?P<over>[-+]?{_PLAIN})\}}\s?\{{(?P<under>[-+]?{_PLAIN})\}}"
    rf"|\$?(?P<value>{_PLAIN})"
    rf"(?:[eE](?P<e>[-+]?\d+)(?!\w)|\s?(?:\\times|\\cdot|×|·|\*)\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-+]?\d+)\}}?"
    rf"|/(?P<below>{_PLAIN}))?)"
)
_SPACED = re.compile(r"\\[,!;: ]|(?<=\d)\{,\}(?=\d)")
_EXACT = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""Decimal context that turns overflows and invalid text into infinity or NaN instead of raising exceptions."""


def _clean(text: str) -> str:
    text = _SPACED.sub(lambda m: "," if m.group() == "{,}" else "", text[-TAIL:])
    return text.replace(r"\$", "$").translate(SIGNS)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _value(m: re.Match) -> Decimal:
    """Return the value of a `_NUMBER` match, or NaN. The current decimal context must be `_EXACT`."""
    if m["over"]:
        value = _decimal(m["over"]) / _decimal(m["under"])
    else:
        exponent = m["e"] or m["power"] or "0"
        if len(exponent.lstrip("+-0")) > MOST_DIGITS:
            return Decimal("nan")
        value = _decimal(m["value"]).scaleb(int(exponent))
        if m["below"]:
            value /= _decimal(m["below"])
    return -value if m["sign"].strip() == "-" else value


def _last_number(solution: str) -> Decimal | None:
    """Return a response's last number, or None if there is none.

    The result is NaN if the number has no value or its exponent is too long.
    """
    box = last_box(solution)
    text = solution if box is None else box
    if len(text) > TAIL:  # drop a number whose start is cut off
        text = re.sub(r"^[\d.,]+", "", text[-TAIL:])
    found = list(_NUMBER.finditer(_clean(text)))
    return _value(found[-1]) if found else None


def _truth_of(ground_truth: object) -> Decimal:
    """Return the number in a ground truth (alone, in a box or after `####`). Raises ValueError if there is none."""
    text = truth_text(ground_truth)
    box = last_box(text)
    m = _NUMBER.fullmatch(_clean(text.rpartition("####")[2] if box is None else box).strip(" $").rstrip(" $."))
    value = _value(m) if m else Decimal("nan")
    if not value.is_finite():
        raise ValueError(f"numeric compares with a number, but the truth is {text[:60]!r}: {ADVICE}")
    return value


def _tolerance(extra: dict, name: str, default: float) -> Decimal:
    given = extra.get(name)
    value = default if given is None else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} {str(value)[:60]!r} of the row's extra_info must be a finite number of at least 0")
    return Decimal(value)


def numeric(item: RewardInput) -> Reward:
    r"""Return 1 if the last number in the last `\boxed{...}`, or in the response if there is no box, is within the
    tolerance of the ground truth. The part `format` is 1 if there is a number.
    """
    with localcontext(_EXACT):
        truth, given = _truth_of(item.ground_truth), _last_number(item.solution)
        relative = _tolerance(item.extra, "tolerance", TOLERANCE) * abs(truth)
        allowed = max(relative, _tolerance(item.extra, "absolute_tolerance", 0.0))
        if given is None or not given.is_finite():
            return Reward(0.0, {"format": float(given is not None)})
        return Reward(float(abs(given - truth) <= allowed), {"format": 1.0})
