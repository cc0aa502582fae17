r"""The last `\boxed{...}`, compared as text in a normal form: the test of equality of the MATH data set.

The normal form has the rules of Hendrycks et al. 2021 (https://arxiv.org/abs/2103.03874, `is_equiv` of
https://github.com/hendrycks/math), which verl's `math_reward` keeps: docs/rewards.md lists them, and the differences.
Nothing is computed: `2/4` is not `\frac{1}{2}`, and `1,000` is not `1000`. The reward `math` does that.
"""

import re

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.text import SIGNS, truth_text

LONGEST = 4096
"""Characters of the longest box that is read."""
_TOKEN = re.compile(r"\\.|[{}]", re.DOTALL)
_OPEN = re.compile(r"\s{0,9}\{")
_REMOVED = ("\n", r"\!"), (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$")
_SLASH = re.compile(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)")


class _MalformedError(ValueError):
    """LaTeX for which the rules have no normal form."""


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, or of `\boxed x` up to a `$`. None: there is none, or it is never closed.

    An escaped brace is a character of the answer: it neither opens nor closes anything.
    """
    start = text.rfind(r"\boxed")
    if start < 0:
        return None
    rest = text[start + len(r"\boxed") :][:LONGEST]
    opened = _OPEN.match(rest)
    if opened is None:
        return rest.partition("$")[0] if rest.startswith(" ") else None
    depth = 1
    for token in _TOKEN.finditer(rest, opened.end()):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[opened.end() : token.start()]
    return None


def _roots(text: str) -> str:
    r"""Give `\sqrt3` its braces."""
    first, *rest = text.split(r"\sqrt")
    if "" in rest:
        raise _MalformedError(r"\sqrt of nothing")
    return first + "".join(r"\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _fractions(text: str) -> str:
    r"""Give `\frac12` and `\frac1{72}` their braces; a text with a fraction of one character stays as it is."""
    out, *rest = text.split(r"\frac")
    made = [out]
    for part in rest:
        if not part:
            raise _MalformedError(r"\frac of nothing")
        if part[0] == "{":
            made.append(part)
        elif len(part) == 1:
            return text
        else:
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            made.append(f"{{{part[0]}}}{below}")
    return r"\frac".join(made)


def normal_form(text: str) -> str:
    """The form in which answers are compared. Raises ValueError for a text that has none."""
    text = text.translate(SIGNS)
    for each in _REMOVED[0]:
        text = text.replace(each, "")
    text = text.replace(r"\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for each in _REMOVED[1]:
        text = text.replace(each, "")
    text, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise _MalformedError("two units")
    text = text.replace(r"\\%", "").replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = re.sub(r"^(\s*-?)\.", r"\g<1>0.", text)
    name, *sides = text.split("=")
    if len(sides) == 1 and len(name) <= 2:  # `x = 5`
        text = sides[0]
    text = _fractions(_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    slash = _SLASH.fullmatch(text)
    return rf"\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def same(answer: str, truth: str) -> bool:
    """Tells whether two answers have one normal form; where one of them has none, whether they are the same text."""
    try:
        return normal_form(answer) == normal_form(truth)
    except _MalformedError:
        return answer == truth


def boxed(item: RewardInput) -> Reward:
    r"""1 if the last `\boxed{...}` has the truth's normal form. Nothing is computed. Part `format`: there is a box."""
    whole = truth_text(item.ground_truth)
    inside = last_box(whole)
    truth = whole if inside is None else truth_text(inside)
    answer = last_box(item.solution)
    if answer is None:
        return Reward(0.0, {"format": 0.0})
    return Reward(float(same(answer, truth)), {"format": 1.0})
