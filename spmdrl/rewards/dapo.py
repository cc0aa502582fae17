r"""Competition maths as DAPO grades it (https://arxiv.org/abs/2503.14476): 1 or -1, from the last 300 characters.

`math_dapo` compares the last `Answer: ...` line with the truth after the normalisation of Minerva (Lewkowycz et al.
2022, https://arxiv.org/abs/2206.14858, appendix D.1). `math_dapo_boxed` wants `\boxed{...}` in the last 100
characters to be the truth to the letter, but for the characters of a minus. They are the two ways of verl's
`math_dapo`, whose default is the first.
"""

import re

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import last_box
from spmdrl.rewards.text import SIGNS, truth_text

TAIL, BOX_TAIL = 300, 100
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Applied one after the other, before `_REMOVED`."""
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{([^}}]*)\}}") for name in ("text", "textbf", "overline"))


def _line(text: str) -> str:
    """Take one line to the inside of its first `$...$`, and without boxes and commands around texts."""
    dollars = text.split("$", 2)
    if len(dollars) == 3:
        # The signs stay until braces are given, which they may stand in.
        text = f"${dollars[1]}$"
    for command in _UNWRAPPED:
        end = text.rfind("}") + 1  # beyond it nothing is closed, and a search from each command would be quadratic
        text = command.sub(r"\1", text[:end]) + text[end:]
    before, box, inside = text.partition(r"\boxed{")
    if box and "}" in inside:
        inside, _, after = inside.rpartition("}")
        text = before + inside + after
    return text


def normal_form(text: str) -> str:
    """The form in which answers are compared: what follows the last `=`, without units, articles and spaces."""
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
    """1 if the last line `Answer: ...` within the last 300 characters has the truth's normal form, else -1. Parts:
    `acc`, 1 or 0; `format`, there is such a line.
    """
    truth = normal_form(truth_text(item.ground_truth))
    answers = _ANSWER.findall(item.solution[-TAIL:])
    right = bool(answers) and normal_form(answers[-1]) == truth
    return Reward(1.0 if right else -1.0, {"acc": float(right), "format": float(bool(answers))})


def math_dapo_boxed(item: RewardInput) -> Reward:
    r"""1 if the last `\boxed{...}` within the last 100 characters is the truth to the letter (any minus), else -1.
    Parts: `acc`, 1 or 0; `format`, there is a box.
    """
    truth = truth_text(item.ground_truth).translate(SIGNS)
    answer = last_box(item.solution[-BOX_TAIL:].translate(SIGNS))
    return Reward(
        1.0 if answer == truth else -1.0, {"acc": float(answer == truth), "format": float(answer is not None)}
    )
