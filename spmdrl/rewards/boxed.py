r"""Rewards for competition maths that compare normalised answer text without evaluating it.

The reward `math` compares values. `boxed` compares the last `\boxed{...}` with the equality check of the MATH data set
(Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874, `is_equiv` of https://github.com/hendrycks/math), which verl's
`math_reward` also uses. `2/4` does not equal `\frac{1}{2}`, and `1,000` does not equal `1000`. docs/rewards.md lists
the rules and the differences from `is_equiv`.

`math_dapo` and `math_dapo_boxed` return 1 or -1 for the answer at the end of a response, as in DAPO
(https://arxiv.org/abs/2503.14476). `math_dapo`, verl's default, compares the last `Answer: ...` line after Minerva's
normalisation (Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix D.1). `math_dapo_boxed` compares the
content of the last box verbatim, except that Unicode minus signs and dashes are replaced by `-`.
"""

import re

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.text import SIGNS, closing, truth_text

LONGEST = 4096
"""Maximum length of a box in characters."""
TAIL, BOX_TAIL = 300, 100
"""How many characters at the end of a response DAPO searches for an answer line and for a box."""
_OPEN = re.compile(r"\s{0,9}\{")
_FORMATTING = (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$")
_SLASH = re.compile(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)")
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Replacements, applied in this order before the strings in `_REMOVED` are deleted."""
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{([^}}]*)\}}") for name in ("text", "textbf", "overline"))


class _MalformedError(ValueError):
    """Raised for LaTeX that has no normal form, such as an empty root."""


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or of `\boxed x` up to a `$`, or None if the box is missing or
    unclosed.

    An escaped brace is part of the answer and does not count as an opening or closing brace.
    """
    start = text.rfind(r"\boxed")
    if start < 0:
        return None
    rest = text[start + len(r"\boxed") :][:LONGEST]
    opened = _OPEN.match(rest)
    if opened is None:
        return rest.partition("$")[0] if rest.startswith(" ") else None
    end = closing(rest, opened.end())
    return None if end is None else rest[opened.end() : end]


def _roots(text: str) -> str:
    r"""Add missing braces, so that `\sqrt3` becomes `\sqrt{3}`."""
    first, *rest = text.split(r"\sqrt")
    if "" in rest:
        raise _MalformedError(r"\sqrt of nothing")
    return first + "".join(r"\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _fractions(text: str) -> str:
    r"""Add the missing braces in `\frac12` and `\frac1{72}`. Text with an incomplete fraction is returned unchanged."""
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


def _math_form(text: str) -> str:
    text = text.translate(SIGNS).replace("\n", "").replace(r"\!", "")
    text = text.replace(r"\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for each in _FORMATTING:
        text = text.replace(each, "")
    text, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise _MalformedError("two units")
    text = text.replace(r"\\%", "").replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = re.sub(r"^(\s*-?)\.", r"\g<1>0.", text)
    name, *sides = text.split("=")
    if len(sides) == 1 and len(name) <= 2:  # drop the name in `x = 5`
        text = sides[0]
    text = _fractions(_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    slash = _SLASH.fullmatch(text)
    return rf"\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def _same(answer: str, truth: str) -> bool:
    try:
        return _math_form(answer) == _math_form(truth)
    except _MalformedError:
        return answer == truth


def boxed(item: RewardInput) -> Reward:
    r"""Return 1 if the last `\boxed{...}` has the ground truth's normal form, else 0. Values are not computed. The part
    `format` is 1 if there is a box.
    """
    whole = truth_text(item.ground_truth)
    inside = last_box(whole)
    truth = whole if inside is None else truth_text(inside)
    answer = last_box(item.solution)
    if answer is None:
        return Reward(0.0, {"format": 0.0})
    return Reward(float(_same(answer, truth)), {"format": 1.0})


def _line(text: str) -> str:
    """Return the first `$...$` in a line, or else the whole line, with boxes and `_UNWRAPPED` commands unwrapped."""
    dollars = text.split("$", 2)
    if len(dollars) == 3:
        # Keep the dollar signs until `_dapo_form` has added braces, because a dollar sign can end up inside braces.
        text = f"${dollars[1]}$"
    for command in _UNWRAPPED:
        end = text.rfind("}") + 1  # text after the last brace cannot match, and searching it would take quadratic time
        text = command.sub(r"\1", text[:end]) + text[end:]
    before, box, inside = text.partition(r"\boxed{")
    if box and "}" in inside:
        inside, _, after = inside.rpartition("}")
        text = before + inside + after
    return text


def _dapo_form(text: str) -> str:
    """Return an answer's normal form: the text after the last `=`, without units, articles and spaces."""
    text = text.translate(SIGNS).rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for each in _REMOVED:
        text = text.replace(each, "")
    text = "\n".join(_line(line) for line in text.split("\n"))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text.strip())


def math_dapo(item: RewardInput) -> Reward:
    """Return 1 if the last `Answer: ...` line in the last 300 characters has the ground truth's normal form, else -1.
    The part `acc` is 1 or 0, and the part `format` is 1 if there is such a line.
    """
    truth = _dapo_form(truth_text(item.ground_truth))
    answers = _ANSWER.findall(item.solution[-TAIL:])
    right = bool(answers) and _dapo_form(answers[-1]) == truth
    return Reward(1.0 if right else -1.0, {"acc": float(right), "format": float(bool(answers))})


def math_dapo_boxed(item: RewardInput) -> Reward:
    r"""Return 1 if the last `\boxed{...}` in the last 100 characters is exactly the ground truth, else -1. Unicode
    minus signs and dashes count as `-`. The part `acc` is 1 or 0, and the part `format` is 1 if there is a box.
    """
    truth = truth_text(item.ground_truth).translate(SIGNS)
    answer = last_box(item.solution[-BOX_TAIL:].translate(SIGNS))
    return Reward(
        1.0 if answer == truth else -1.0, {"acc": float(answer == truth), "format": float(answer is not None)}
    )
