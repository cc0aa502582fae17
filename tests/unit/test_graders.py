"""Built-in graders of answers on plain strings: what each form scores, and that hostile strings take no time."""

import contextlib
import time
from decimal import Decimal

import pytest

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import last_box
from spmdrl.rewards.choice import chosen
from spmdrl.rewards.load import QUICK


def score(function: str, solution: str, truth: object, **extra: object) -> float:
    return QUICK[function](RewardInput("src", solution, truth, extra)).score


# -- boxed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}} end}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{3} and \boxed{4", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x \in \left\{ 1 \right.}", r"x \in \left\{ 1 \right."),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$ as said", "5"),
        (r"\boxed 4 and \boxed{5}", "5"),
        (r"\boxed5", None),
        (r"\boxed{a\\}", r"a\\"),
        (r"\fbox{5}", None),
        ("5", None),
    ],
)
def test_last_box(text, inside):
    found = last_box(text)
    assert (found.strip() if found is not None else None) == inside


BOXED = {
    r"\frac{1}{2}": (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac12", r"\frac1{2}", "1/2", "0.5", ".5", r"\frac 12"),
    r"2\sqrt{3}": (r"2\sqrt3", r"2\sqrt{3}", r"2 \sqrt{3}", r"x=2\sqrt{3}"),
    "90": (r"90^\circ", r"90^{\circ}", r"90\%", r"\$90", r"90\text{ cm}", "90", "x = 90", r"9\!0"),
    r"(1,2]": (r"\left(1,2\right]", "(1, 2]"),
}
NOT_BOXED = {
    r"\frac{1}{2}": ("2/4", "0.50", r"\frac{2}{4}", r"50\%", "abc=0.5"),
    r"2\sqrt{3}": (r"2\sqrt 3", r"\sqrt{12}"),
    "1000": ("1,000", "1000.0", "1e3"),
    "90": (r"90\text{cm}", "-90", r"90\text{ a}\text{ b}", r"\sqrt"),
}


@pytest.mark.parametrize(("cases", "expected"), [(BOXED, 1.0), (NOT_BOXED, 0.0)], ids=["same", "other"])
def test_boxed_compares_normal_forms(cases, expected):
    for truth, answers in cases.items():
        for answer in answers:
            for written in (truth, rf"\boxed{{{truth}}}"):
                assert score("boxed", rf"\boxed{{0}} no, it is $\boxed{{{answer}}}$.", written) == expected, answer
    assert QUICK["boxed"](RewardInput("", "90", "90")) == Reward(0.0, {"format": 0.0})
    assert QUICK["boxed"](RewardInput("", r"\boxed{9}", 90)) == Reward(0.0, {"format": 1.0})
    # Texts without a normal form are equal to themselves alone.
    assert score("boxed", r"\boxed{\frac}", r"\frac") == 1 and score("boxed", r"\boxed{\frac }", r"\frac") == 0


# -- DAPO -------------------------------------------------------------------------------------------------------------

DAPO = {
    "34": (
        "Answer: 34",
        "answer : 34",
        "Answer: $34$",
        "**Answer:** 5\nAnswer:\n34",
        "Answer: x = 34",
        "Answer: 34 cm",
    ),
    "1234": ("Answer: 1,234", "Answer: $1{,}234$", r"Answer: \$1,234", r"Answer: \text{1234}"),
    r"\frac{1}{2}": (r"Answer: \frac12", r"Answer: $\frac{1}{2}$", r"Answer: \boxed{\frac{1}{2}}"),
    r"\sqrt{2}": (r"Answer: \sqrt2", r"Answer: \text{}\sqrt{2} degrees"),
}
NOT_DAPO = {
    "34": (
        "34",
        r"\boxed{34}",
        "Answer 34",
        "Answer: 34.",
        "Answer: 35",
        "Answer: 34" + " " * 300,
        "Answer: 34\nAnswer: 5",
    ),
    "1234": ("Answer: 1234.0",),
    r"\frac{1}{2}": ("Answer: 1/2", "Answer: 0.5", r"Answer: \dfrac{1}{2} "),
}


def test_math_dapo_is_1_or_minus_1():
    for truth, answers in DAPO.items():
        for answer in answers:
            got = QUICK["math_dapo"](RewardInput("", "work\n" + answer, truth))
            assert got == Reward(1.0, {"acc": 1.0, "format": 1.0}), answer
    for truth, answers in NOT_DAPO.items():
        assert {answer: score("math_dapo", answer, truth) for answer in answers} == dict.fromkeys(answers, -1.0)
    assert QUICK["math_dapo"](RewardInput("", "34", 34)) == Reward(-1.0, {"acc": 0.0, "format": 0.0})


def test_math_dapo_boxed_wants_the_letter_within_100_characters():
    right = Reward(1.0, {"acc": 1.0, "format": 1.0})
    assert QUICK["math_dapo_boxed"](RewardInput("", r"so \boxed{34}.", 34)) == right
    assert QUICK["math_dapo_boxed"](RewardInput("", r"\boxed{34 }", "34")) == Reward(-1.0, {"acc": 0.0, "format": 1.0})
    assert score("math_dapo_boxed", r"\boxed{34}" + "." * 100, "34") == -1.0
    assert score("math_dapo_boxed", "Answer: 34", "34") == -1.0


# -- multiple choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "solution",
    [
        *("Answer: B", "Answer: b", "Answer: (B)", "**Answer:** B", "**Answer: B**", "Answer:\nB", "Answer: $B$"),
        *(
            "Answer: B. A cat has paws.",
            "Answer: B) Paris",
            "Answer: B, a cat",
            "Answer: A\nAnswer: B",
            "Answer: (B) I say",
        ),
        *("The answer is B.", "The answer is (b)", "The correct option is B because A is wrong."),
        *("The answer is B. The options A and C are wrong.", "Answer: the answer is B", "It is A. (B)\nAnswer is: B"),
        *(
            r"\boxed{B}",
            r"\boxed{\text{B}}",
            r"\boxed{\textbf{(B) } 12}",
            r"Answer: \boxed{B}",
            r"\boxed{A} no \boxed{B}",
        ),
        *("(B)", "so it is (B).", "(A) is wrong. So (B).", "(A) 1\n(B) 2\nI take (B)", "B", " b. ", "**B**"),
        r"\boxed{B}, so the answer is clear (A)",
    ],
)
def test_choice_reads_one_letter(solution):
    assert chosen(solution)[0] == "B"
    assert [score("choice", solution, truth) for truth in ("B", "(b)", "B.", "A")] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "solution",
    [
        *(
            "Answer: A, B",
            "Answer: A or B",
            "Answer: B or A",
            "Answer: AB",
            "Answer: A/B",
            "Answer: B and a",
            "Answer: B, b, c",
        ),
        *(
            "Answer: (A)(B)",
            "Answer: (B) (A)",
            "Answer: B. A. C. D.",
            "Answer: B\nA\nC",
            "Answer: B or A maybe",
            "Answer: B A C",
        ),
        *(r"\boxed{A,B}", r"\boxed{AB}", r"\boxed{B \text{ or } C}", "(A) or (B)", "(B) (C)"),
        *(
            "Answer: Bob",
            "Answer: a cat",
            "Answer: A cat",
            "answer: All of them",
            "The answer is not B",
            "Because",
            "",
            "B is it",
        ),
    ],
)
def test_choice_gives_nothing_to_lists_and_words(solution):
    assert [score("choice", solution, truth) for truth in "ABCD"] == [0, 0, 0, 0]


def test_choice_parts_and_truth():
    assert QUICK["choice"](RewardInput("", "Answer: B", "B")).parts == {"format": 1.0}
    assert QUICK["choice"](RewardInput("", "(B)", "B")) == Reward(1.0, {"format": 0.0})
    for truth in ("AB", "", 2, "B or C"):
        with pytest.raises(ValueError, match="truth is .*--data.answer-column"):
            score("choice", "Answer: B", truth)


# -- numbers within a tolerance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        ("so 3.1415926", 3.14159265, 1),
        ("so 3.1415", 3.14159265, 0),
        ("1 then -1,234.5.", "-1234.5", 1),
        ("$1,234.50", "1234.5", 1),
        ("about 6.022e23", 6.022e23, 1),
        (r"\boxed{6.022 \times 10^{23}} per mol of 1", "6.022e23", 1),
        (r"$6.022\cdot10^{23}$", "6.022e23", 1),
        ("1.5e-3", "0.0015", 1),
        (r"\boxed{\frac{3}{4}}", 0.75, 1),
        (r"-\frac{3}{4}", -0.75, 1),
        ("it is 3/4", 0.75, 1),
        ("it is 1/3", r"\frac{1}{3}", 1),
        ("it is 1/0", 5, 0),
        (".5", 0.5, 1),
        ("−5", -5, 1),
        ("10-3", 3, 1),
        (r"1{,}000{,}000", 1000000, 1),
        (r"1\,000\,000", 1000000, 1),
        ("work 5\n#### 72", "long work\n#### 72", 1),
        (r"5", r"\boxed{5}", 1),
        ("72 of 80", 72, 0),
        ("none", 72, 0),
        ("50%", 0.5, 0),
        ("0.0000001", 0, 0),
        ("-0", 0, 1),
        ("9" * 2000, 5, 0),
        ("0." + "0" * 2000 + "5", 5, 0),
        ("1e999999999999", 5, 0),
        ("1e99999999", 5, 0),
        ("1e-99999999", 0, 0),
    ],
)
def test_numeric_is_near_enough(solution, truth, right):
    assert score("numeric", solution, truth) == right
    assert score("numeric", solution, truth, tolerance=None) == right


def test_numeric_takes_its_tolerance_from_the_row():
    assert [score("numeric", "101", 100, tolerance=t) for t in (0.00999, 0.01, 0)] == [0, 1, 0]
    assert [score("numeric", "0.1", 0, absolute_tolerance=t) for t in (0.09, 0.1)] == [0, 1]
    assert score("numeric", "101", 100, tolerance=0.02, absolute_tolerance=0.5) == 1, "the wider counts"
    large = Decimal(2**70)
    assert [score("numeric", str(large + d), str(large), tolerance=0) for d in (0, 1)] == [1, 0]
    assert QUICK["numeric"](RewardInput("", "no", 1)).parts == {"format": 0.0}
    for tolerance in ("0.1", -1, True, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match="tolerance .* of the row's extra_info must be a finite number of at least 0"
        ):
            score("numeric", "1", 1, tolerance=tolerance)
    for truth in ("seven", "7 apples", "1/0", "", None):
        with pytest.raises(ValueError, match="--data.answer-column"):
            score("numeric", "1", truth)


# -- questions with short answers -------------------------------------------------------------------------------------


def test_exact_match_qa_normalises_as_squad_does():
    truths = {"target": ["The Beatles", "Beatles, The"]}
    for answer in ("the beatles", "  Beatles.\n", "THE  BEATLES!", "a Beatles"):
        assert score("exact_match_qa", f"<answer>x</answer> so <answer>{answer}</answer>", truths) == 1.0
    for solution in ("The Beatles", "<answer>The Beatles", "<answer>Beatle</answer>", "<answer>theBeatles</answer>"):
        assert score("exact_match_qa", solution, truths) == 0.0
    for truth in ("Paris", ["Rome", "Paris"], {"target": "paris"}):
        assert score("exact_match_qa", "<answer>Paris</answer>", truth) == 1.0
    assert score("exact_match_qa", "<answer>1</answer>", 1) == 1.0
    assert [score("exact_match_qa", "<answer>x</answer>" * n, "x") for n in (10, 11)] == [1.0, 0.25]
    assert score("exact_match_qa", "<answer>y</answer>" * 11, "x") == 0.0
    assert QUICK["exact_match_qa"](RewardInput("", "x", "x")).parts == {"format": 0.0}


@pytest.mark.parametrize("function", ["boxed", "math_dapo", "math_dapo_boxed", "exact_match_qa"])
def test_an_empty_truth_is_refused(function):
    for truth in ("", " ", None):
        with pytest.raises(ValueError, match="--data.answer-column"):
            score(function, "1", truth)
    assert score("exact_match_qa", "<answer></answer>", ["", None, "x"]) == 0.0, "empty ones of several are left out"


# -- hostile strings --------------------------------------------------------------------------------------------------

N = 1_000_000
HOSTILE = {
    "braces": r"\boxed{" + "{" * N,
    "closed braces": r"\boxed{" + "{" * N + "}" * N + "}",
    "open boxes": r"\boxed{" * (N // 7),
    "boxes": r"\boxed{1}" * (N // 9),
    "spaced boxes": r"\boxed " * (N // 7),
    "escapes": r"\boxed{" + "\\" * N,
    "fractions": r"\boxed{" + r"\frac" * (N // 5) + "}",
    "roots": r"\boxed{" + r"\sqrt3" * (N // 6) + "}",
    "texts": "Answer: " + r"\text{" * (N // 6),
    "dollars": "Answer: " + "$" * N,
    "answers": "Answer: A " * (N // 10),
    "answer and spaces": "Answer" + " " * N + ": 5",
    "spaces": " " * N + "5",
    "lines": "\n" * N,
    "digits": "#### " + "1" * N,
    "groups": "#### 1" + ",111" * (N // 4) + "1",
    "points": "1." * (N // 2),
    "signs": "-" * N + "1",
    "exponent": "#### 1e" + "9" * N,
    "power": r"\boxed{1 \times 10^{" + "9" * 1000 + "}}",
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "slashes": "1/" * (N // 2),
    "hashes": "#" * N,
    "tags": "<answer>" * (N // 8),
    "closed tags": "<answer>" * (N // 8) + "</answer>" * (N // 9),
    "articles": "<answer>" + "a " * (N // 2) + "</answer>",
    "parentheses": "(" * N,
    "letters": "(A) " * (N // 4),
    "not text": "\x00\ud800\u202e٣²" * (N // 5),
}
READ_NO_TEXT = {"none", "environment"}
SECONDS = 2.0


def readable_truth(function: str) -> str:
    """Returns a truth that a reward can compare with."""
    for truth in ("x", "7"):
        with contextlib.suppress(ValueError):
            QUICK[function](RewardInput("src", "", truth))
            return truth
    raise AssertionError(f"{function} reads neither a letter nor a number")


@pytest.mark.slow
@pytest.mark.parametrize("function", sorted(set(QUICK) - READ_NO_TEXT))
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_strings_take_no_time_and_earn_nothing(function, name):
    item = RewardInput("src", HOSTILE[name], readable_truth(function))
    begun = time.process_time()
    reward = QUICK[function](item)
    assert time.process_time() - begun < SECONDS
    assert reward.score <= 0.0


@pytest.mark.parametrize("name", HOSTILE)
def test_the_reward_of_an_environment_is_the_environments_whatever_the_text_is(name):
    item = RewardInput("src", HOSTILE[name], "7", given=0.25, given_parts={"tries": 2.0})
    assert QUICK["environment"](item) == Reward(0.25, {"tries": 2.0})
    with pytest.raises(ValueError, match="set --env"):
        QUICK["environment"](RewardInput("src", HOSTILE[name], "7"))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["boxed", "math_dapo", "math_dapo_boxed", "exact_match_qa"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_truths_take_no_time(function, name):
    begun = time.process_time()
    with contextlib.suppress(ValueError):  # some hold no answer
        score(function, r"<answer>7</answer> \boxed{7} Answer: 7", HOSTILE[name])
    assert time.process_time() - begun < SECONDS
