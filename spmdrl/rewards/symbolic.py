r"""Parses mathematical answers into expressions and compares them, with math-verify and latex2sympy2-extended.

An answer is parsed completely or not at all: ignoring a part, such as the end of `1-\mathrm{e}^{-2}`, could make
different answers equal. Font commands are therefore removed from names first, units and number bases are parsed
separately, and an answer that the grammar still rejects has no value.

math-verify (https://github.com/huggingface/Math-Verify) compares absolute differences and so treats all small values as
equal. This module also requires the difference to be small relative to the values.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from spmdrl.rewards.latex import named, spelled
from spmdrl.rewards.text import SIGNS
from spmdrl.rewards.units import changes_value, differ, known, money, split_unit

LONGEST = 2000
"""Maximum length of an answer in characters."""
EXACT, DECIMAL = 1e-9, 2e-6
"""Maximum relative difference between equal values: EXACT for exact values, DECIMAL if one is a decimal, which might be
rounded."""
NOTHING = 1e-25
"""Maximum absolute value that counts as 0, to allow for rounding errors."""
_MARKED = re.compile(r"\$[^$\n]{1,2000}\$|\\\([^\n]{1,2000}?\\\)|\\\[[^\n]{1,2000}?\\\]")
_NUMBERS = re.compile(r"(?<![\w.])\.?\d[\d,.]*")
_BASED = re.compile(r"\(?(-?[0-9]+)\)?_\s*\{?\s*(?:(\d+)|\\text\{ ?([a-z]+)\})\s*\}?")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
}
_PROSE = re.compile(r"(?<!\\)\b[A-Za-z]+\s+(?:[A-Za-z]|\d+\s+[A-Za-z])")
_LIMITED = re.compile(
    r"(?:\b(?:minus|negative|half|third|quarter|twice|double|triple|thrice|root|square|cube|at\s+(?:most|least)|up\s+to"
    r"|(?:more|less|fewer|greater|larger|smaller|higher|lower|other)\s+than|not|over|under|above|below|exceeds?)"
    r"(?:\s+(?:of|a|an|the|about|exactly|equal|to))*|[<>\u2264\u2265\u2260]=?|!=|\\(?:neq?|[lg](?:t|eq?|eqslant)))[\s$({\\]*$",
    re.IGNORECASE,
)
"""Words and signs before a number that change its meaning, as in `at most 5`."""
_PER_CENT = re.compile(r"(-?(?:[\d.,{}/\s]|\\[dtc]?frac)*\d[}\s]*)\\?%")
_UNREADABLE = re.compile(
    r"\d\s*_"  # a number base within an expression
    r"|(?<![_\d.])\d[\d.]*\s+\.?\d"  # two numbers side by side
    r"|\\text\{[^{}]*\}\s*[A-Za-z0-9({\\]"  # words in a text command, followed by a letter or number
    r"|(?<![\d.])(?:\d{4}([-/])\d\d?\1\d\d?|\d\d?([-/])\d\d?\2\d{4})(?![\d.])"  # a date
    r"|'|\\prime|\\cross"  # marks that do not follow a letter
)


@dataclass(frozen=True)
class Value:
    """The parsed value of an answer."""

    expression: Any
    """SymPy expression."""
    unit: str | None
    """Normal form of the unit, or None if there is none."""
    base: str | None
    """Number base, as in `12_7`, or None if not stated."""
    words: frozenset[str]
    """Words of four or more letters, in lower case; SymPy parses them as products of their letters."""
    per_cent: bool = False
    """True for a percentage, such as 50%, which equals both 50 and 0.5."""


@lru_cache(maxsize=1024)  # samples of a prompt share the ground truth and often the answer
def read(text: str) -> Value | None:
    """Parse an answer and return its value, or None if it cannot be parsed completely."""
    if len(text) > LONGEST:
        return None
    currency = money(text)
    text, unit = split_unit(spelled(text))
    unit = unit or currency
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"\1", text)
    based = _BASED.fullmatch(text)
    base = str(_BASES.get(based[3], based[2] or based[3])) if based else None
    text = based[1] if based else text
    text = named(text)
    bare = re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    words = frozenset(re.findall(r"(?<![A-Za-z])[a-z]{4,}", bare.lower())) - {"infinity", "percent", "sqrt"}
    if (
        not text
        or changes_value(text)
        or _UNREADABLE.search(text)
        or (words and _PROSE.search(re.sub(r"\\text\{[^{}]*\}", " ", text)))
    ):
        return None
    number = _PER_CENT.fullmatch(text)
    expression = _expression(number[1] if number else text)
    return None if expression is None else Value(expression, unit, base, words, number is not None)


def _expression(text: str) -> Any:
    """Parse an entire text and return it as a SymPy expression, or None if the grammar rejects it."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    from sympy import Basic, MatrixBase

    try:
        latex = normalize_latex(text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))
        real, cased = not should_treat_as_complex(latex), ConversionConfig(lowercase_symbols=False)
        found = latex2sympy(latex, is_real=real, normalization_config=None, conversion_config=cased)
    except Exception:  # the grammar and SymPy raise many exception types, including RecursionError
        return None
    return found if isinstance(found, Basic | MatrixBase) else None


@lru_cache(maxsize=1024)
def mentioned(text: str, numbers: bool, alone: bool) -> str:
    """Return the answer that prose mentions: the last formula in LaTeX delimiters, else the last number, else "".

    numbers: True to accept a number without delimiters. alone: True to return "" if there are several formulas or
    numbers.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import parse
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    text = text.translate(SIGNS)
    marked = _MARKED.findall(text)
    if alone and len(marked or _NUMBERS.findall(text)) != 1:
        return ""
    as_it_is = NormalizationConfig(basic_latex=False, boxed="none")
    ways = [LatexExtractionConfig(normalization_config=as_it_is), ExprExtractionConfig()][: 1 + numbers]
    found = parse(text, ways, extraction_mode="first_match", parsing_timeout=0)
    written = found[-1] if found and isinstance(found[-1], str) else ""
    if not marked and re.search(rf"{re.escape(written)}\s?[\\_^]", text):
        return ""  # only part of a formula without delimiters, such as the 12 in `12_7`
    before, _, behind = text.rpartition(written) if written else ("", "", "")
    if changes_value(behind) or _LIMITED.search(before[-80:]):
        return ""  # `5 million` and `half of 5` are not 5
    return written + "%" if len(found) == 2 and "%" not in written and _per_cent(found[0]) != found[0] else written


def same(truth: Value | None, answer: Value | None) -> bool:
    """Return whether two answers have the same value."""
    if truth is None or answer is None:
        return False
    if differ(truth.unit, answer.unit) or any(
        a and b and a != b for a, b in ((truth.base, answer.base), (truth.words, answer.words))
    ):
        return False
    if truth.per_cent != answer.per_cent and known(answer.unit if truth.per_cent else truth.unit):
        return False  # 5% is not 5 cm
    a, b = truth.expression, answer.expression
    if truth.per_cent == answer.per_cent:
        return _same(a, b)
    return _same(a, b) or (_same(a / 100, b) if truth.per_cent else _same(a, b / 100))


def _same(a: Any, b: Any) -> bool:
    from math_verify import verify
    from sympy import Expr

    try:
        if _names(a) != _names(b) and _names(a, True) == _names(b, True):  # math-verify ignores the case of long names
            return False
        if _apart(a, b):  # this check is faster than simplifying the difference
            return False
        if isinstance(a, Expr) and isinstance(b, Expr) and a.doit() == b.doit():
            return True
        return bool(verify(a, b, timeout_seconds=None)) or _near(a, b)
    except Exception:  # SymPy can raise any exception on unusual answers, including RecursionError
        return False


def _names(expression: Any, folded: bool = False) -> set[str]:
    return {name.name.lower() if folded else name.name for name in expression.free_symbols}


def _near(a: Any, b: Any) -> bool:
    """Return whether two numbers are equal up to rounding. If neither is a decimal, return False.

    Tuples are compared entry by entry.
    """
    from sympy import Expr, Float, Tuple

    if isinstance(a, Tuple) and isinstance(b, Tuple):
        return len(a) == len(b) and all(x == y or _near(x, y) for x, y in zip(a, b, strict=True))
    if not (isinstance(a, Expr) and isinstance(b, Expr) and (a.has(Float) or b.has(Float))):
        return False
    if a.free_symbols or b.free_symbols or not (a.is_number and b.is_number):
        return False
    x, y = complex(a.doit().evalf(30)), complex(b.doit().evalf(30))
    return abs(x - y) <= _allowance(a, b) * max(abs(x), abs(y))


def _allowance(a: Any, b: Any) -> float:
    """Return the allowed relative difference: DECIMAL if one value is a (possibly rounded) decimal, else EXACT."""
    from sympy import Float, Integer

    if not (a.has(Float) or b.has(Float)):
        return EXACT
    numbers = getattr(a, "is_number", False) and getattr(b, "is_number", False)
    written_out = all(x.has(Float) or isinstance(x, Integer) for x in (a, b))
    return EXACT if numbers and written_out else DECIMAL


def _numbers(expression: Any) -> list[complex] | None:
    """Evaluate an expression's entries, substituting fixed arbitrary numbers for its symbols.

    Only the right side of an equation `x = ...` is evaluated. The result is None for all other relations.
    """
    from sympy import Eq, Float, Interval, MatrixBase, Set, Symbol, Tuple

    if isinstance(expression, Eq):
        return _numbers(expression.rhs) if isinstance(expression.lhs, Symbol) else None
    if isinstance(expression, Interval):
        entries = [expression.start, expression.end]
    elif isinstance(expression, MatrixBase):
        entries = list(expression.flat())
    elif isinstance(expression, Tuple) or (isinstance(expression, Set) and getattr(expression, "is_FiniteSet", False)):
        entries = list(expression.args)
    else:
        names = sorted(expression.free_symbols, key=str)
        at = [(name, Float(f"0.{731 + 58 * i % 269}", 30)) for i, name in enumerate(names)]
        value: Any = expression.subs(at)
        return [complex(value.evalf(30))]
    inside = [_numbers(entry) for entry in entries]
    return None if None in inside else [x for each in inside if each for x in each]


def _per_cent(expression: Any) -> Any:
    """Replace each percentage in an expression by its number, such as 50% by 50."""
    from sympy import Basic, Integer, Rational, UnevaluatedExpr

    if not isinstance(expression, Basic):
        return expression
    return expression.xreplace({UnevaluatedExpr(Rational(1, 100)): Integer(1)})


def _apart(a: Any, b: Any) -> bool:
    """Evaluate two expressions with the same symbols and return whether they certainly differ in value."""
    if a.free_symbols != b.free_symbols:  # they may be equal, because SymPy parses words as products of letters
        return False
    ways = product([a, _per_cent(a)], [b, _per_cent(b)])
    return all(_apart_as_they_are(x, y) for x, y in ways)


def _apart_as_they_are(a: Any, b: Any) -> bool:
    try:
        mine, theirs = _numbers(a), _numbers(b)
    except (TypeError, ValueError, AttributeError, OverflowError):  # an expression has no numerical value
        return False
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    near = _allowance(a, b)
    for x in mine:
        match = next((i for i, y in enumerate(theirs) if x == y or abs(x - y) <= _allowed(x, y, near)), None)
        if match is None:
            return True
        theirs.pop(match)
    return False


def _allowed(x: complex, y: complex, near: float) -> float:
    return near * max(abs(x), abs(y)) if x and y else NOTHING
