"""Compares what a program gives with what a test wants: texts of standard output, and values of calls."""

import math
import re
import sys
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
"""A number that is not whole may be missed by this, relative to the larger one and to 1."""
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
LONGEST_NUMBER = 400
"""Characters of a number that is not whole, at most."""


def same_text(printed: str, wanted: str) -> bool:
    """True where two outputs have the same words on the same lines.

    A number may be written otherwise, and may differ a little where the wanted one is not whole. Blank lines at the
    ends and space around words do not count.
    """
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, wanted))
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    return all(a == b or _near(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))


def _near(a: str, b: str) -> bool:
    if _WHOLE.fullmatch(a) and _WHOLE.fullmatch(b):
        return _plain_whole(a) == _plain_whole(b)
    if max(len(a), len(b)) > LONGEST_NUMBER or not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
        return False
    x, y = float(a), float(b)
    return Decimal(a) == Decimal(b) if _WHOLE.fullmatch(b) or math.isinf(x) or math.isinf(y) else close(x, y)


def _plain_whole(text: str) -> str:
    """Return a whole number's digits without leading zeros, with a minus where it has one."""
    digits = text.lstrip("+-").lstrip("0")
    return f"-{digits}" if digits and text[0] == "-" else digits


def close(a: float, b: float) -> bool:
    """True where two numbers are equal, or differ by no more than rounding may."""
    try:
        return a == b or abs(a - b) <= TOLERANCE * min(max(1.0, abs(a), abs(b)), sys.float_info.max)
    except OverflowError:
        return False


def same_answer(found: Any, wanted: Any) -> bool:
    """True where the value of a call is the wanted one, or the only item of a list: APPS wraps some values so."""
    return same_value(found, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and same_value(found, wanted[0]))


def same_value(found: Any, wanted: Any) -> bool:
    """True where two values are equal: tuples as lists, a number within TOLERANCE where the wanted one is not whole."""
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same_value, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        # Keys of JSON are texts.
        mine, theirs = ({_key(key): value for key, value in x.items()} for x in (found, wanted))
        return mine.keys() == theirs.keys() and all(same_value(mine[key], theirs[key]) for key in mine)
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return close(found, wanted) if isinstance(wanted, float) else found == wanted
    return type(found) is type(wanted) and found == wanted


def _key(key: Any) -> Any:
    return str(key) if type(key) is int and abs(key) < 1 << 64 else key
