"""Graders give 1 to right answers however they are written, and 0 to wrong ones that look like them."""

import logging
import math
import random
import re
from pathlib import Path

import pytest
import torch

from spmdrl.config.builtin import REWARDS
from spmdrl.data.scores import is_right
from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.load import QUICK
from spmdrl.rewards.math import load
from spmdrl.rewards.trial import Row
from spmdrl.rewards.units import split_unit, unit_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
MARKS = (r"so it is \boxed{%s}.", "work\nAnswer: %s", "Answer: $%s$", "so it is $%s$.")


@pytest.fixture(scope="module")
def score():
    level = logging.getLogger("math_verify").level
    functions = {**QUICK, "math": load("math", {})}
    yield lambda name, solution, truth: functions[name](RewardInput("", solution, truth)).score
    logging.getLogger("math_verify").setLevel(level)


def near_misses() -> list[tuple[str, str, list[str], list[str]]]:
    """Reward, truth, right answers and wrong answers of each row of the page."""
    found = re.search(r"<!-- table: near -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert found
    rows = [[re.findall(r"`([^`]*)`", cell) for cell in line.split(" | ")] for line in found[1].splitlines()[2:]]
    return [(reward[0], truth[0], right, wrong) for reward, truth, right, wrong in rows]


@pytest.mark.slow
@pytest.mark.parametrize("row", near_misses(), ids=lambda row: f"{row[0]} {row[1]}")
def test_the_pages_answers_score_as_it_says(row, score):
    reward, truth, right, wrong = row
    assert right and wrong
    for marks in MARKS if reward == "math" else ("%s",):
        assert {a: score(reward, marks % a, truth) > 0 for a in right} == dict.fromkeys(right, True), marks
        assert {a: score(reward, marks % a, truth) > 0 for a in wrong} == dict.fromkeys(wrong, False), marks


MATH = {
    r"2^{10}": ([r"1024", r"2^{5}\cdot 32"], ["10^2", "20"]),
    r"\log_2 3": ([r"\log_{2}(3)", r"\frac{\ln 3}{\ln 2}"], [r"\log_3 2", r"\log 3"]),
    r"\infty": ([r"+\infty", "infinity"], [r"-\infty", "1"]),
    r"25\text{ and }36": (["25, 36", "36 and 25"], ["25", "25, 35"]),
    r"\text{Evelyn}": (["Evelyn", "evelyn", r"\textbf{Evelyn}"], ["Angela", "Levyne"]),
    r"864 \mbox{ inches}^2": (["864", r"864\text{ in}^2", "864 square inches"], ["865", "864 cubic inches"]),
    r"12\text{ m/s}": (["12", r"12\,\mathrm{m}\,\mathrm{s}^{-1}", "12 meters per second"], ["12 km/h", "12 m/s^2"]),
    r"1 \pm \sqrt{19}": ([r"1+\sqrt{19}, 1-\sqrt{19}"], [r"1+\sqrt{19}", r"1 \pm \sqrt{18}"]),
    r"\begin{pmatrix}1\\2\end{pmatrix}": ([r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"], ["1", "1, 2, 3"]),
    r"10\%": (["10", "0.1", r"10 \%"], ["1", r"1\%"]),
    r"x^2+y^2=25": (["y^2+x^2=5^2"], ["x^2+y^2=24", "25"]),
    r"x \text{ if } y": ([r"x \text{ if } y"], [r"y \text{ if } x", "xy"]),
    r"\frac{1}{2}gt^2": ([r"\frac{1}{2} g t^2", r"\frac{gt^2}{2}"], [r"\frac{1}{2}t^2", r"\frac{1}{2}g"]),
}
"""truth -> right answers, wrong answers"""


@pytest.mark.parametrize("truth", MATH)
def test_math_reads_an_answer_whole(truth, score):
    right, wrong = MATH[truth]
    for marks in MARKS[::2]:
        assert [score("math", marks % a, truth) for a in right] == [1.0] * len(right), (marks, right)
        assert [score("math", marks % a, truth) for a in wrong] == [0.0] * len(wrong), (marks, wrong)


ALIKE = r"""
30 \text{ min} ## 30
30 ## 30\text{ min}
30\text{ minutes} ## 30\text{ min}
5\text{ sec} ## 5
5 \mathrm{~min} ## 5
2\text{ seconds} ## 2\text{ sec}
\frac{1}{2}\text{ min} ## \frac12
30 min ## 30
\min(2,3) ## 2
\text{min}(2,3) ## 2
\operatorname{min}(2,3) ## \min(2,3)
2\operatorname{sec} x ## 2\sec x
2\sec x ## 2 \sec x
\mathrm{sec} x ## \sec x
2\mathrm{sin} x ## 2\sin x
20^\circ\mathrm{C} ## 20
20 ## 20^\circ\text{C}
20^\circ\text{C} ## 20^\circ
12^{\text{th}} ## 12
68^\circ F ## 68
20^\circ C ## 20
20\,^{\circ}\mathrm{C} ## 20
3^{\text{rd}} ## 3
60 mph ## 60\text{ miles per hour}
60\text{ mi/h} ## 60\text{ mph}
10\text{ km/hr} ## 10\text{ kmph}
9.8\ \frac{\text{m}}{\text{s}^2} ## 9.8
6\frac{\text{cm}}{\text{s}} ## 6\text{ cm/s}
€5 ## 5
£5 ## 5
¥5 ## 5
5¢ ## 5
\pounds 5 ## 5
33\frac{1}{3}\% ## 33\frac13\%
12.5\% ## 12.5
66.67\% ## 66.67
33\frac13\% ## 33\frac{1}{3}
50\% ## 50
12.5\% ## 0.125
50\text{ percent} ## 0.5
50 percent ## 0.5
50\text{ percent} ## 50\%
50\text{ percent} ## 50
0.666667 ## \frac{2}{3}
0.333333 ## \frac13
5 apples ## 5
5\text{ red} ## 5
5\text{ percent} ## 5\%
0.05 ## 5\text{ percent}
50\%\text{ of all} ## 50\%
4 inches squared ## 4 square inches
4\text{ inches squared} ## 4\text{ in}^2
n\text{ is odd} ## n\text{ is odd}
6\text{ apples} ## 6\text{ apples}
6\text{ apple} ## 6\text{ apples}
5\text{ million} ## 5\text{ million}
5 million ## 5\text{ million}
12\text{ ways} ## 12
5 half ## 5 half
Yes ## yes
\text{No Solution} ## no solution
NONE ## None
Infinity ## \infty
\Gamma(5) ## 24
2\Gamma ## \Gamma\cdot 2
I^2R ## RI^2
E=mc^2 ## mc^2=E
GMm ## mGM
AB ## BA
y'+y''=0 ## y''+y'=0
y^{\prime\prime}+y=0 ## y''+y=0
y^\prime ## y′
f'(x)=2x ## 2x
y_1' ## y'_1
A^{\top}B ## A^T B
\mathbf x^T \mathbf y ## \mathbf{x}^{\mathrm T}\mathbf{y}
(1+r)^T ## (r+1)^{T}
\begin{pmatrix}1&2\\3&4\end{pmatrix}^T ## \begin{pmatrix}1&3\\2&4\end{pmatrix}
2(\mathbf a\times\mathbf b) ## 2\mathbf{a}\times\mathbf{b}
\vec v\cdot\vec w ## \vec{w}\cdot\vec{v}
a\times b ## ba
3\times\mathbf{u} ## 3\mathbf{u}
\angle{ABC} ## \angle ABC
ABC+1 ## 1+ABC
\text{HHT} ## HHT
30' ## 30
5' ## 5\text{ ft}
2\hat i ## 2\hat{i}
3\hat{\imath} ## 3\hat i
2020–01–02 ## 2020-01-02
5 USD ## \$5
£5 ## 5\text{ pounds}
$5$ ## \$5
5\text{ dollars} ## $5
$5$ cm ## 5
\$5\text{ million} ## 5\text{ million}
1.6e-19 ## 1.6\times10^{-19}
6.02E23 ## 6.02\times10^{23}
3e8 ## 3\cdot10^8
1e-07 ## 10^{-7}
2e-3 ## 2\mathrm{e}-3
\text{5 apples} ## 5
\text{5 apples} ## 5\text{ apples}
\mathrm{5cm} ## 5
\mathrm{5\,cm} ## 5\text{ cm}
\mathrm{2x} ## 2x
"""
APART = r"""
3 squared ## 3
7 cubed ## 7
5 million ## 5
5 thousand ## 5
5 factorial ## 5
5 dozen ## 5
4 root ## 4
5 half ## 5
5\text{ billion} ## 5\text{ million}
5\text{ million} ## 5
5\text{ million dollars} ## 5
2\text{ thirds} ## 2
n\text{ is odd} ## n\text{ is even}
10\%\text{ increase} ## 10\%\text{ decrease}
5\text{ red} ## 5\text{ blue}
5\text{ percent} ## 5\text{ cm}
5\text{ cm} ## 5\%
5\% ## 5\text{ dollars}
30\text{ min} ## 30\text{ sec}
20^\circ\mathrm{C} ## 20^\circ\mathrm{F}
0.667 ## \frac{2}{3}
0.66667 ## \frac{2}{3}
33\frac{1}{3}\% ## 33\frac23\%
12.5\% ## 12.6
60\text{ mph} ## 60\text{ km/h}
9.8\ \frac{\text{m}}{\text{s}^2} ## 9.8\ \frac{\text{m}}{\text{s}}
12^{\text{th}} ## 13
50\text{ percent} ## 0.05
2\min(2,3) ## 2
2\sec x ## 2
R-r ## 0
R-r ## r-R
M+m ## 2m
GMm ## Gm^2
R_1 ## r_1
x_A ## x_a
(R_1,2) ## (r_1,2)
E ## e
2I ## 2i
I^2 ## -1
X ## x
\text{A} ## a
F(x) ## f(x)
\vec{A} ## \vec{a}
PV=nRT ## pv=nrt
Rr and RR ## rr and RR
GMmr ## GMmR
\mathcal{A} ## \mathbb{A}
y''+y=0 ## y'+y=0
y'=2 ## y=2
f'(x) ## f(x)
A' ## A
x_1' ## x_1
y'^2 ## y^2
\alpha' ## \alpha
A^T ## A
A^T B ## A B
2^T ## 2
\lambda^T ## \lambda
(A+B)^T ## A+B
\mathbf a\times\mathbf b ## \mathbf a\cdot\mathbf b
\mathbf a\times\mathbf b ## \mathbf b\times\mathbf a
\vec{a}\times\vec{b} ## \vec{b}\times\vec{a}
\mathbf{a}\times(\mathbf{b}+\mathbf{c}) ## \mathbf{a}\cdot(\mathbf{b}+\mathbf{c})
\nabla\times\mathbf{F} ## \nabla\cdot\mathbf{F}
30^\circ ## 30'
5' ## 5''
HHT ## HTH
2ABC ## 2ACB
A'B'C' ## ABC
\overline{AB} ## \overline{ab}
2020-01-02 ## 2020-02-01
1/2/2020 ## 2/1/2020
£5 ## \$5
£5 ## $5
\euro 5 ## \$5
5¢ ## \$5
£5 ## 5\text{ dollars}
5 USD ## 5 EUR
\$5 ## 5\%
\$3, \$5 ## \$3, £5
5 or more ## 5
1.6e-19 ## 1.6e-18
\text{5 apples} ## \text{6 apples}
\text{5 cm} ## 5\text{ km}
\text{5 million} ## 5
\text{5 h 30 min} ## 5
5\text{ below zero} ## 5
"""
GREEK = ("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega")


@pytest.mark.parametrize("name", GREEK)
def test_math_keeps_capital_and_small_greek_letters_apart(name, score):
    for form in (r"\%s", r"2\%s", r"\%s+x", r"x_{\%s}", r"\%s'", r"\frac{1}{\%s}"):
        a, b = form % name, form % name.lower()
        assert [score("math", rf"\boxed{{{x}}}", y) for x in (a, b) for y in (a, b)] == [1, 0, 0, 1], form


@pytest.mark.parametrize(("rows", "right"), [(ALIKE, 1.0), (APART, 0.0)], ids=["alike", "apart"])
def test_math_reads_units_per_cents_and_decimals_in_either_place(rows, right, score):
    pairs = [line.split(" ## ") for line in rows.strip().splitlines()]
    for a, b in [*pairs, *([b, a] for a, b in pairs)]:
        got = {marks: score("math", marks % a, b) for marks in MARKS[:2]}
        assert got == dict.fromkeys(got, right), (a, b)


def test_math_takes_no_part_of_prose_for_the_answer(score):
    assert score("math", "so it is 12_7", "12") == score("math", "so it is 12_7", "12_8") == 0.0
    assert score("math", "There are 12 of 30, so it is 12.", "12") == 1.0
    assert score("math", "Answer: 12 of 30", "12") == 0.0, "which number is meant is not said"
    assert score("math", "Answer: about 12 of them", "12") == 1.0


LIMITED = (
    *("minus %s", "negative %s", "half of %s", "twice %s", "not %s", "at most %s", "at least %s", "no more than %s"),
    *("less than %s", "%s below zero", "%s or more", r"\text{at most }%s", r"\text{half of }%s", r"\neq %s", "< %s"),
    *(r"\geq %s", r"\text{not }%s", "the square root of %s", "a third of %s"),
)


@pytest.mark.parametrize("form", LIMITED)
def test_math_takes_no_number_out_of_words_that_change_it(form, score):
    for number in ("5", "12", "0.5"):
        words = form % number
        for marks in MARKS:
            assert score("math", marks % words, number) == 0.0, marks
            assert score("math", marks % number, words) == 0.0, marks
        assert score("math", rf"\boxed{{{words}}}", words) == score("math", rf"\boxed{{{number}}}", number) == 1.0
    for form in (
        "It is not 6 but %s.",
        "He has at most 8, so it is %s.",
        "10 minus 5 is $%s$.",
        "Answer: about %s of them",
    ):
        assert score("math", form % 5, "5") == 1.0, form


# -- made-up variations -----------------------------------------------------------------------------------------------

NAMES = (r"\mathrm{%s}", r"\mathbf{%s}", r"\mathit{%s}", r"\text{%s}", r"\operatorname{%s}", "%s")
SUMS = 20


@pytest.mark.slow
def test_math_tells_signs_letters_marks_and_units_of_made_up_sums_apart(score):
    """A sum of terms scores 1 in any order and with any dress of its names, and 0 with one part changed."""
    draw = random.Random(1)
    for _ in range(SUMS):
        terms = [
            (draw.choice("+-"), draw.randint(2, 9), name, draw.choice(["", "", "_1", "'", "''"]), draw.randint(1, 3))
            for name in draw.sample("abcuvwxyzABRXYZEI", 3)
        ]
        unit = draw.choice(["", r"\text{ cm}", r"\,\mathrm{kg}"])

        def written(terms: list, unit: str = unit) -> str:
            parts = []
            for sign, factor, name, mark, power in terms:
                dressed = draw.choice(NAMES) % name + mark
                parts.append(f"{sign}{factor}{dressed}" + ("" if power == 1 else f"^{{{power}}}"))
            return "".join(parts).removeprefix("+").replace("-", draw.choice("-\u2212\u2013")) + unit

        truth = written(terms)
        assert score("math", rf"\boxed{{{written(draw.sample(terms, 3))}}}", truth) == 1.0, truth
        sign, factor, name, mark, power = terms[0]
        wrong = [
            [("-" if sign == "+" else "+", factor, name, mark, power), *terms[1:]],
            [(sign, factor + 1, name, mark, power), *terms[1:]],
            [(sign, factor, "t", mark, power), *terms[1:]],
            [(sign, factor, name.swapcase(), mark, power), *terms[1:]],
            [(sign, factor, name, "''" if mark == "'" else "'", power), *terms[1:]],
            [(sign, factor, name, mark, power + 1), *terms[1:]],
            terms[1:],
        ]
        for changed in draw.sample(wrong, 3):
            other = written(changed)
            assert score("math", rf"\boxed{{{other}}}", truth) == 0.0, (truth, other)
            assert score("math", rf"\boxed{{{truth}}}", other) == 0.0, (other, truth)
        if unit:
            for other, expected in (("", 1.0), (r" \text{ m}", 0.0)):
                assert score("math", rf"\boxed{{{written(terms, other)}}}", truth) == expected, (truth, other)


@pytest.mark.parametrize("form", ["%s", r"\text{%s}", r"\angle %s", r"\triangle %s", r"2%s+x", r"\overline{%s}", "%s'"])
def test_math_keeps_the_order_of_capitals_in_made_up_names(form, score):
    draw = random.Random(3)
    for _ in range(SUMS):
        letters = [draw.choice("ABCDHPQRTWXYZ") for _ in range(draw.randint(3, 5))]
        name, other = "".join(letters), "".join(draw.sample(letters, len(letters)))
        want = [1.0, float(name == other), float(name == other)]
        pairs = [(name, name), (name, other), (other, name)]
        assert [score("math", rf"\boxed{{{form % a}}}", form % b) for a, b in pairs] == want, (name, other)


def test_math_compares_made_up_magnitudes_relatively(score):
    draw = random.Random(2)
    for _ in range(30):
        head, power = draw.randint(11, 98), draw.choice([-34, -31, -19, -9, 9, 23])
        truth = rf"{head / 10}\times10^{{{power}}}"
        assert score("math", rf"\boxed{{{head}\cdot10^{{{power - 1}}}}}", truth) == 1.0, truth
        for other in (rf"{(head + 1) / 10}\times10^{{{power}}}", rf"{head / 10}\times10^{{{power - 1}}}", "0"):
            assert score("math", rf"\boxed{{{other}}}", truth) == 0.0, (truth, other)


FORMS = (
    *("{}", "({})", "Answer: {}", "**Answer: {}**", r"\boxed{{{}}}", "The answer is {}.", "The answer is ({}) {noun}"),
    *("The answer is {} because it is {noun}", "The answer is {}, which is {noun}", "Answer: {}: Vitamin {o}"),
    *("Answer: {}) {noun}", "Answer: {}. Hepatitis {o}", "Answer: {}: Vitamins {o}, {p} and Z", "Answer: {} - {noun}"),
    *("The answer is {} because {o} is wrong.", "The answer is {} since {o} and {p} are {noun}", "Answer: {}, not {o}"),
    *("The answer is {} only.", "So the answer is {} then.", "The best answer is {} overall", "The answer is {} here"),
    *("The answer is {} using the formula", "The answer is {} assuming an ideal gas", "The answer is {} above"),
    *("The answer is {} per the table", "The answer is {} thanks to {noun} air", "Answer: {} again"),
    *("The answer is {}, not {o} or {p}.", "The answer is {} rather than {o}", "Answer: {} instead of {o}"),
    *("The answer is {}, I think", "The answer would be {}", "The answer should be {}, I believe."),
    *("Answer: {} or {o}", "Answer: {}, {o}", "Answer: {} {o}", "Answer: {}/{o}", "Answer: {} {noun}"),
    *("Answer: {} or {o}, not {p}", "Answer: {}, {o}, not {p}"),
    *(
        "Answer: ({})({o})",
        "The answer is {} {noun}",
        "Answer: {}) {noun} or {o}) {noun}",
        "Answer: {} and {o} are {noun}",
        "{} is {noun}",
    ),
)
NO_CHOICE = 12
"""Forms at the end of FORMS that name no choice, or several."""


@pytest.mark.parametrize("form", FORMS)
def test_choice_grades_every_letter_alike(form, score):
    letters = "ABCDEFGHIJ"
    for noun in ("warm", "cat", "true"):
        for i, letter in enumerate(letters):
            for by in (1, 4, 8):
                o, p = letters[(i + by) % 10], letters[(i + by + 1) % 10]
                solution = form.format(letter, noun=noun, o=o, p=p)
                right = float(FORMS.index(form) < len(FORMS) - NO_CHOICE)
                assert [score("choice", solution, each) for each in (letter, o, p)] == [right, 0, 0], solution


# -- minus signs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minus", ["-", "\u2212", "\u2013"])
@pytest.mark.parametrize("function", sorted({*QUICK, "math"} - {"none", "environment", "choice"}))
def test_every_grader_reads_every_minus_and_drops_none(function, minus, score):
    form = RIGHT.get(function, "3")
    for number in ("5", "12", "407"):
        negative = form.replace("3", minus + number)
        assert score(function, negative, f"-{number}") == score(function, negative, f"{minus}{number}") == 1.0
        assert score(function, negative, number) <= 0.0
        assert score(function, form.replace("3", number), f"{minus}{number}") <= 0.0


def test_short_answers_keep_the_signs_and_values_of_numbers(score):
    def qa(answer: str, truth: object) -> float:
        return score("exact_match_qa", f"<answer>{answer}</answer>", truth)

    for a, b in (("-5", "5"), (".5", "5"), ("-$5", "$5"), ("-5 degrees", "5 degrees"), ("-.5 m", ".5 m")):
        assert [qa(a, b), qa(b, a), qa(a, a), qa(b, b)] == [0, 0, 1, 1], (a, b)
    for a, b in (("5.0", "5"), (".5", "0.5"), ("1,000", "1000"), ("$5", "5"), ("5.", "5"), ("10-15 men", "1015 men")):
        assert qa(a, b) == qa(b, a) == 1.0, (a, b)
    assert qa("4.2", "42") == 1.0, "as verl"


# -- units and truths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rest", "unit"),
    [
        (r"540\,\text{ cm}^2", "540", "cm2"),
        ("540 square cm", "540", "cm2"),
        ("5 miles per hour", "5", "h-1 mi1"),
        (r"90^\circ", "90", "degree1"),
        ("90\u00b0", "90", "degree1"),
        ("3 people", "3", "?peopl1"),
        (r"3\text{ ab}", "3", "?ab1"),
        ("2ab", "2ab", None),
        ("5m", "5m", None),
        ("5 m", "5", "m1"),
        ("5 infinity", "5 infinity", None),
        ("x+y", "x+y", None),
        (r"\text{ cm}", r"\text{ cm}", None),
        (r"5+\text{ cm}", r"5+\text{ cm}", None),
    ],
)
def test_units(text, rest, unit):
    assert split_unit(text) == (rest, unit)


def test_units_have_one_name():
    assert len({unit_of(u) for u in ("m/s^2", "meters per second squared", "m s^{-2}")}) == 1
    assert unit_of("cm") != unit_of("km") and unit_of("m^2") != unit_of("m^3") and unit_of("apples") is None


TEXT_GRADERS = sorted(set(QUICK) - {"none", "environment"} | {"math"})


@pytest.mark.parametrize("function", TEXT_GRADERS)
@pytest.mark.parametrize("truth", [None, math.nan, math.inf, [], ["3", "4"], {"a": 1}], ids=str)
def test_a_truth_that_is_none_is_refused_by_every_grader(function, truth, score):
    if function == "exact_match_qa" and truth == ["3", "4"]:
        return
    for solution in (r"\boxed{None}", r"\boxed{nan}", "Answer: None", "nan", "<answer>None</answer>"):
        with pytest.raises(ValueError, match="the truth is .*--data.answer-column"):
            score(function, solution, truth)


RIGHT = {
    "boxed": r"\boxed{3}",
    "choice": "",
    "exact_match": "3",
    "exact_match_qa": "<answer>3</answer>",
    "gsm8k": "#### 3",
    "math": r"\boxed{3}",
    "math_dapo": "Answer: 3",
    "math_dapo_boxed": r"\boxed{3}",
}


@pytest.mark.parametrize("function", [f for f in TEXT_GRADERS if f != "choice"])
def test_a_column_of_floats_holds_whole_numbers(function, score):
    solution = RIGHT.get(function, "3")
    assert score(function, solution, 3.0) == score(function, solution, 3) == score(function, solution, "3") == 1.0
    assert score(function, solution.replace("3", "4"), 3.0) <= 0.0
    if function != "first_integer":
        assert score(function, solution.replace("3", "0.0000001"), 1e-7) == 1.0


def test_every_grader_of_text_is_tried():
    others = {"none", "environment", "code", "code_partial", "auto", "reasoning_gym"}
    assert set(TEXT_GRADERS) | others == set(REWARDS)


# -- what counts as right ---------------------------------------------------------------------------------------------


def test_a_sum_of_parts_that_rounding_leaves_below_1_counts_as_right():
    whole = 0.6 + 0.3 + 0.1
    assert whole < 1.0 and is_right(whole) and is_right(1.0) and is_right(3.0)
    assert not is_right(0.9999) and not is_right(math.nan)
    assert is_right(torch.tensor([whole, 0.9999, 2.0], dtype=torch.float64)).tolist() == [True, False, True]
    assert Row("gold", {0: Reward(whole), 1: Reward(0.5)}).right == 0.5
