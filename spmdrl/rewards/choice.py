r"""The reward for multiple-choice questions answered with a single letter.

The letter can be written as `Answer: B`, `The answer is (B).`, `\boxed{B}`, `(B)`, or be the entire response. The first
three forms are marked answers, which take precedence over the others. If there are several marked answers, or several
sentences with a letter in parentheses, the last one counts. An answer that also lists other letters is wrong, so that
naming all letters does not pay off.
"""

import re

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import last_box
from spmdrl.rewards.text import ADVICE, truth_text

TAIL = 2000
"""Number of characters at the end of a response that are searched for the answer."""
_WRAPPING = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|it)?|mbox|left|right)(?![A-Za-z])|\\[()\[\] ,;!]|[$*_`{}]")
_MARK = re.compile(
    r"(?i)\b(?:answer|option|choice)[*_`]{0,4}\s{0,3}(?:(?:is|(?:would|should|must|will)\s{1,3}be)"
    r"[*_`]{0,4}\s{0,3}(?::|(?=\W*\w))|:)\s{0,9}"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_FIRST = re.compile(r"\W{0,9}(?:(?:option|choice)\s{1,3})?\(?([A-Za-z])(?![A-Za-z0-9'])")
_GOES_ON = (
    # conjunctions, pronouns and verbs
    "because|since|as|for|so|if|when|where|which|who|that|while|whereas|although|though|but|not|is|was|has|the|this"
    "|these|it|we|they|there"
    # prepositions, and participles used as prepositions
    "|about|above|according|across|after|against|along|among|around|assuming|at|based|before|behind|below|beneath|beside"
    "|besides|between|beyond|by|concerning|considering|despite|due|during|except|following|from|given|having|in|including"
    "|inside|instead|into|knowing|near|of|on|out|outside|over|owing|per|rather|regarding|thanks|through|throughout|to"
    "|toward|towards|under|unless|unlike|until|upon|using|versus|via|vs|with|within|without"
    # adverbs
    "|accordingly|actually|again|almost|alone|already|also|always|anyway|apparently|best|certainly|clearly|consequently"
    "|correctly|definitely|directly|either|exactly|finally|hence|here|however|indeed|instead|likely|most|namely|now"
    "|obviously|once|only|overall|perhaps|precisely|presumably|probably|really|simply|specifically|still|surely|then"
    "|therefore|thus|too|undoubtedly|yet"
)
"""Words that can follow a chosen letter. Before any other word, A might be the article and I the pronoun. The rule
applies to all letters, so that no letter has an advantage."""
_REFUSED = re.compile(
    r",?\s*\b(?:and |but )?(?:not|rather than|instead of|as opposed to|unlike)\s+(?:option |choice )?\(?[A-Z]\)?"
    r"(?:(?:\s*,\s*(?:or |nor |and )?|\s+(?:or|nor|and)\s+)(?:option |choice )?\(?[A-Z]\)?(?![A-Za-z0-9']))*"
    r"(?![A-Za-z0-9'])"
)
"""Letters that an answer excludes, as in `B, not A or C` and `B rather than C`."""
_ASIDE = re.compile(r",?\s+I (?:think|believe|guess|suppose|assume|would|am|know|feel|say)\b")
"""First-person phrases after the letter, as in `B, I think`."""
_OTHER = re.compile(
    r"(?:(?<![A-Za-z0-9' ])|(?<![A-Za-z0-9'] )(?<= )|(?<=\b[A-Za-z] )|(?<=\bor )|(?<=\band )|(?<=option )|(?<=choice ))"
    r"[A-Z](?![A-Za-z0-9'])"
)
"""A single letter that does not follow a word: `Vitamin C` does not name a choice."""
_WORD = re.compile(r"(?<![A-Za-z])(?<!or )(?<!and )(?<!, )(?<!/ )[A-Z](?= [a-z])(?! (?:or|and)\b)")
"""A letter that is the subject of a clause, as in `because B is wrong`, the article `A`, or the pronoun `I`."""
_LISTED = re.compile(r"(?:[,/&|+;]|\b(?:or|and)\b)\s{0,3}\(?(?!a [a-z]|I [a-z])([A-Za-z])(?![A-Za-z0-9'])")
_LABELLED = re.compile(r"(?:[,/&|+;]|\b(?:or|and)\b)\s{0,3}\(?([A-Za-z])\s?[):]")
_PARENTHESISED = re.compile(r"\(([A-Za-z])\)")
_TRUTH = re.compile(r"\(?([A-Za-z])\)?[.:]?")


def _others(text: str, letter: str) -> bool:
    """Return whether the text after a letter names another choice."""
    text = _REFUSED.sub("", _ASIDE.sub("", text))
    if re.match(r" (?:because|since|as|for|given|due)\b", text):
        named = []  # the explanation `because A and C are wrong` names no choice
    elif re.match(r"\)?[.:)]?\s*(?:[-\u2013\u2014]\s+)?[A-Za-z][a-z]+\b(?<!\bor)(?<!\band)", text) and text[:1] != " ":
        # The choice's text follows, as in `B: Vitamins A, C and D`, so only letters written as labels are choices.
        named = _LABELLED.findall(text)
    else:
        named = _OTHER.findall(_WORD.sub("", text)) + _LISTED.findall(text)
    return any(found.upper() != letter for found in named + _PARENTHESISED.findall(text))


def _begins(text: str) -> bool:
    return _FIRST.match(_WRAPPING.sub("", text).strip()) is not None


def _letter(text: str) -> str | None:
    """Return the letter that an answer starts with, or None if it starts with no letter or names several letters."""
    text = _WRAPPING.sub("", text).strip()
    head, *rest = _SENTENCE.split(text, maxsplit=1)
    first = _FIRST.match(head)
    if first is None:
        return None
    letter, after = first[1].upper(), head[first.end() :]
    bare = not re.search(r"\w", after)
    parenthesised = head[: first.end()].rstrip().endswith("(" + first[1]) and after.startswith(")")
    if first[1].islower() and not (bare or parenthesised):  # `a` is an article in `a cat`
        return None
    if not parenthesised and re.match(rf" (?!(?:or|and|{_GOES_ON})\b)[a-z]", after):  # `A` is an article in `A cat`
        return None
    if _others(after, letter):
        return None
    # `A. B. C.` lists several choices, but `B. A cat is no dog.` explains one choice.
    nearest = re.match(r"\W*([A-Z])(?![A-Za-z0-9'])(?! [a-z])", rest[0]) if rest else None
    return None if bare and nearest and nearest[1] != letter else letter


def chosen(solution: str) -> tuple[str | None, bool]:
    """Return the letter that a response chooses, or None, and whether the response has a marked answer."""
    tail = solution[-TAIL:]
    # `The answer is clear` does not mark an answer. `Answer: none` does, although it has no letter.
    marks = [m.end() for m in _MARK.finditer(tail) if ":" in m.group() or _begins(tail[m.end() :][:40])]
    box = last_box(tail)
    if box is not None and (not marks or marks[-1] <= tail.rfind(r"\boxed")):
        return _letter(box), True
    if marks:
        # Include the line after the marked one, because a list of letters can continue there.
        return _letter("\n".join(tail[marks[-1] :].split("\n", 2)[:2])), True
    if re.fullmatch(r"\W{0,9}[A-Za-z]\W{0,9}", solution[:32].strip()) and len(solution) <= 32:
        return _letter(solution), False
    for sentence in reversed(_SENTENCE.split(tail)):
        letters = {letter.upper() for letter in _PARENTHESISED.findall(sentence)}
        if letters:
            return (letters.pop() if len(letters) == 1 else None), False
    return None, False


def choice(item: RewardInput) -> Reward:
    r"""Return 1 if the response chooses the correct letter, ignoring case. The choice is read from `Answer: B`,
    `The answer is B` or `\boxed{B}`, else from `(B)`, else from `B` alone. The part `format` is 1 if the answer is
    marked, as in the first three forms.
    """
    text = truth_text(item.ground_truth).strip()
    truth = _TRUTH.fullmatch(text)
    if truth is None:
        raise ValueError(f"choice compares with one letter, but the truth is {text[:60]!r}: {ADVICE}")
    letter, marked = chosen(item.solution)
    return Reward(float(letter == truth[1].upper()), {"format": float(marked)})
