r"""Multiple choice: one letter, as `Answer: B`, `The answer is (B).`, `\boxed{B}`, `(B)`, or as the whole response.

A marked answer (the first three) counts before a letter in parentheses, and of several the last one. An answer that
lists other letters is none, so that naming all of them does not pay.
"""

import re

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import last_box

TAIL = 2000
"""Characters at the end of a response that are read."""
_WRAPPING = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|it)?|mbox|left|right)(?![A-Za-z])|\\[()\[\] ,;!]|[$*_`{}]")
_MARK = re.compile(r"(?i)\b(?:answer|option|choice)[*_`]{0,4}\s{0,3}(?:is[*_`]{0,4}\s{0,3}(?::|(?=\W*\w))|:)\s{0,9}")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_FIRST = re.compile(r"\W{0,9}(?:(?:option|choice)\s{1,3})?\(?([A-Za-z])(?![A-Za-z0-9'])")
_LONE = re.compile(r"(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9'])")
_WORD = re.compile(r"(?<![A-Za-z])(?<!or )(?<!and )(?<!, )(?<!/ )[AI](?= [a-z])(?! (?:or|and)\b)")
"""The article and the pronoun, which are no choices."""
_LISTED = re.compile(r"(?:[,/&|+;]|\b(?:or|and)\b)\s{0,3}\(?(?!a [a-z]|I [a-z])([A-Za-z])(?![A-Za-z0-9'])")
_PARENTHESISED = re.compile(r"\(([A-Za-z])\)")
_TRUTH = re.compile(r"\(?([A-Za-z])\)?[.:]?")


def _others(text: str, letter: str) -> bool:
    """Tells whether a text names another choice than the letter."""
    named = _LONE.findall(_WORD.sub("", text)) + _PARENTHESISED.findall(text) + _LISTED.findall(text)
    return any(found.upper() != letter for found in named)


def _begins(text: str) -> bool:
    return _FIRST.match(_WRAPPING.sub("", text).strip()) is not None


def _letter(text: str) -> str | None:
    """The one letter with which an answer begins; None where it begins otherwise or names several."""
    text = _WRAPPING.sub("", text).strip()
    head, *rest = _SENTENCE.split(text, maxsplit=1)
    first = _FIRST.match(head)
    if first is None:
        return None
    letter, after = first[1].upper(), head[first.end() :]
    bare = not re.search(r"\w", after)
    parenthesised = head[: first.end()].rstrip().endswith("(" + first[1]) and after.startswith(")")
    if first[1].islower() and not (bare or parenthesised):  # `a cat`
        return None
    if first[1] in "AI" and not parenthesised and re.match(r" (?!or\b|and\b)[a-z]", after):  # `A cat`
        return None
    if _others(after, letter):
        return None
    # `A. B. C.` lists choices, `B. A cat is no dog.` explains one.
    nearest = re.match(r"\W*([A-Z])(?![A-Za-z0-9'])(?! [a-z])", rest[0]) if rest else None
    return None if bare and nearest and nearest[1] != letter else letter


def chosen(solution: str) -> tuple[str | None, bool]:
    """The letter that a response gives, or None, and whether an answer was marked."""
    tail = solution[-TAIL:]
    # `The answer is clear` gives none; `Answer: none` gives none of the letters.
    marks = [m.end() for m in _MARK.finditer(tail) if ":" in m.group() or _begins(tail[m.end() :][:40])]
    box = last_box(tail)
    if box is not None and (not marks or marks[-1] <= tail.rfind(r"\boxed")):
        return _letter(box), True
    if marks:
        # The line after it shows whether a list goes on.
        return _letter("\n".join(tail[marks[-1] :].split("\n", 2)[:2])), True
    if re.fullmatch(r"\W{0,9}[A-Za-z]\W{0,9}", solution[:32].strip()) and len(solution) <= 32:
        return _letter(solution), False
    for sentence in reversed(_SENTENCE.split(tail)):
        letters = {letter.upper() for letter in _PARENTHESISED.findall(sentence)}
        if letters:
            return (letters.pop() if len(letters) == 1 else None), False
    return None, False


def choice(item: RewardInput) -> Reward:
    """1 when the response gives the letter of the truth, in either case. Part `format`: an answer was marked."""
    truth = _TRUTH.fullmatch(str(item.ground_truth).strip())
    if truth is None:
        raise ValueError(
            f"choice compares with one letter and the truth is {str(item.ground_truth)[:60]!r}: "
            "change --data.answer-column or --reward.function"
        )
    letter, marked = chosen(item.solution)
    return Reward(float(letter == truth[1].upper()), {"format": float(marked)})
