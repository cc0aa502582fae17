"""A calculator tool that computes exactly with fractions."""

import ast
import operator
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from spmdrl.env.base import Stateless

LONGEST = 1_000
"""Maximum number of characters in an expression."""
MOST_BITS = 14_000
"""Maximum number of bits in a numerator or denominator: about 4,200 digits, since Python prints at most 4,300."""
MOST_DIGITS = 60
"""Decimals with at most this many digits after the point are printed exactly, as are fractions with at most this many
characters."""
WORDS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\u00a0": " "})
"""Characters that are replaced with Python operators and spaces."""
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator(Stateless):
    """The tool `calculate` for exact arithmetic. It has no state."""

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression exactly.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, as in (3 + 4) * 2 ** 10 / 7.
        """
        return shown(value_of(expression))


def value_of(expression: str) -> Fraction:
    """Return the exact value of an expression.

    Raises:
        ValueError: the text is not an arithmetic expression, or a number is too large; the message is for the model.
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    text = expression.translate(WORDS).strip()
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {text[:80]!r}") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None


def _value(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # A decimal number is read exactly as it is written, not as the nearest float.
        written = (ast.get_source_segment(text, node) or "").replace("_", "")
        _check_exponent(written)
        return _bounded(Fraction(node.value if isinstance(node.value, int) else written))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in OPERATORS:
            return _bounded(Fraction(OPERATORS[type(node.op)](left, right)))
    hint = {ast.BinOp: "write ** for a power", ast.Tuple: "write numbers without commas"}.get(type(node), "")
    hint = hint or "only numbers, + - * / // % ** and parentheses are allowed"
    raise ValueError(f"cannot work out {(ast.get_source_segment(text, node) or text)[:80]!r}: {hint}")


def _check_exponent(written: str) -> None:
    # Only decimal numbers have exponents; in a hexadecimal number `e` is a digit.
    digits = "" if written.lower().startswith("0x") else written.lower().partition("e")[2]
    if digits and (len(digits) > 6 or abs(int(digits)) > MOST_BITS // 4):
        raise ValueError(f"the number {written[:40]} is too large")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("the exponent of a power must be a whole number")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    times = abs(exponent.numerator)
    if abs(base) == 1 or base == 0:  # powers of 1, -1 and 0 stay small for exponents of any size
        return Fraction(1) if times == 0 else base if times % 2 else abs(base)
    larger = max(abs(base.numerator), base.denominator)
    if times * (larger.bit_length() - 1) > MOST_BITS:
        raise ValueError("the power is too large: numbers have at most about 4,200 digits")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large: numbers have at most about 4,200 digits")
    return value


def shown(value: Fraction) -> str:
    """Return a number as text.

    Whole numbers, and decimals with up to `MOST_DIGITS` digits after the point, are exact. A fraction is followed by
    its first digits, as in `1/3 (about 0.333333333333333)`. For a fraction with more than `MOST_DIGITS` characters,
    only the first digits are returned.
    """
    if value.denominator == 1:
        return str(value.numerator)
    twos = (value.denominator & -value.denominator).bit_length() - 1
    fives, rest = 0, value.denominator >> twos
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    places = max(twos, fives)
    if rest == 1 and places <= MOST_DIGITS:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"
    about = Context(prec=15).divide(Decimal(value.numerator), Decimal(value.denominator))
    exact = f"{value.numerator}/{value.denominator}"
    return f"{exact} (about {about})" if len(exact) <= MOST_DIGITS else f"about {about}"
