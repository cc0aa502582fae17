"""The calculator against sympy's exact arithmetic, and expressions that are none."""

import random
from fractions import Fraction

import pytest
import sympy

from spmdrl.env.calculator import Calculator, shown, value_of


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.15:
        return draw.choice([str(draw.randrange(100)), f"{draw.randrange(50)}.{draw.randrange(1000):03}", "1_000", "7"])
    left, right = expression(draw, depth - 1), expression(draw, depth - 1)
    kind = draw.randrange(7)
    if kind == 5:
        return f"({left}) ** {draw.choice(['2', '3', '0', '-1', '(-2)'])}"
    if kind == 6:
        return f"-({left})"
    return f"({left}) {'+-*/'[draw.randrange(4)]} {right}"


def test_values_are_sympys():
    draw = random.Random(1)
    compared = 0
    for _ in range(400):
        text = expression(draw, 4)
        try:
            ours = value_of(text)
        except ZeroDivisionError:
            assert sympy.sympify(text.replace("_", ""), rational=True).has(sympy.zoo, sympy.nan)
            continue
        theirs = sympy.sympify(text.replace("_", ""), rational=True)
        assert (ours.numerator, ours.denominator) == (theirs.p, theirs.q), text
        compared += 1
    assert compared > 300


def test_whole_division_and_remainders_are_pythons_on_fractions():
    draw = random.Random(2)
    for _ in range(200):
        a, b = Fraction(draw.randrange(-99, 99), draw.randrange(1, 9)), Fraction(draw.randrange(1, 99), 4)
        assert value_of(f"({a}) // ({b})") == (a / b).__floor__()
        assert value_of(f"({a}) % (-({b}))") == a - (-b) * (a / -b).__floor__()


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("2 + 2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 (about 0.333333333333333)"),
        ("-7/8", "-0.875"),
        ("1/3 * 3", "1"),
        ("3 × 4 ÷ 6 − 1", "1"),
        ("123456789123456789 * 987654321", str(123456789123456789 * 987654321)),
        ("0.1234567890123456789012345", "0.1234567890123456789012345"),
        ("1e3 + 0x1e", "1030"),
        ("(-1) ** 100000000000001", "-1"),
        ("0 ** 0", "1"),
        ("2 ** -2", "0.25"),
        ("7 // 2 * 2 + 7 % 2", "7"),
        ("2 ** -100 * 3 ** -90", f"about {2.0**-100 * 3.0**-90:.14E}"),
        (" 1\u00a0+ 1 ", "2"),
    ],
)
def test_results_as_text(text, wanted):
    assert Calculator().calculate(text) == wanted


def test_decimals_are_printed_exactly():
    draw = random.Random(3)
    for _ in range(300):
        value = Fraction(draw.randrange(-(10**9), 10**9), 2 ** draw.randrange(9) * 5 ** draw.randrange(9))
        assert Fraction(shown(value)) == value


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("x + 1", "only numbers"),
        ("__import__('os').system('x')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 2", "only numbers"),
        ("[1, 2]", "only numbers"),
        ("2 ^ 3", r"write \*\* for a power"),
        ("1,000 + 1", "without commas"),
        ("2 ** 0.5", "whole number"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 4000 * 10 ** 4000", "too large"),
        ("1e999999999", "too large"),
        ("1e9999999999999999999999", "too large"),
        ("1" * 999, None),
        ("1" * 1001, "longer than 1000"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("-" * 999 + "1", "nested too deeply"),
        ("1" + "+1" * 499, None),
        ("\0", "not an arithmetic expression"),
        ("1 if 1 else 2", "only numbers"),
        ("2 @ 3", "power"),
    ],
)
def test_bad_input_is_said_to_the_model(text, why):
    if why is None:
        Calculator().calculate(text)
        return
    with pytest.raises(ValueError, match=why) as error:
        Calculator().calculate(text)
    assert len(str(error.value)) < 250


def test_division_by_zero_and_the_state():
    for text in ("1 / 0", "1 // 0", "1 % 0", "0 ** -1"):
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            value_of(text)
    tool = Calculator()
    assert tool.reset({}, 0) is None
    tool.restore(tool.state())
