"""Finds spans of text that consist of whole tokens of two tokenizers, a student's and its teacher's."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from spmdrl.data.chat import chosen_template
from spmdrl.data.steps import MARK, progress
from spmdrl.data.template_ends import end_of_turn_tokens

CUT = -1
"""Stands for the end of a token that ends within a character."""
BEFORE = 4
"""Tokens of the prompt that are decoded with a response: some tokenizers drop a blank at a text's start."""

Span = tuple[range, range]
"""Places of the student's and the teacher's tokens in their responses."""


class UnreadableError(Exception):
    """A response cannot be aligned; the message is the reason."""


def decoder(tokenizer: Any) -> Any:
    """Return a function from tokens to their text, control tokens included."""
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def reading(tokenizer: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[str, list[int]]:
    """Return the text of tokens that follow others, and the end of each token in it, in characters (or CUT).

    Raises:
        UnreadableError: the text of some tokens depends on tokens far before or after them.
    """
    decode, lead = decoder(tokenizer), list(before)
    alone = cache(lambda token: decode([token]))
    known, whole = decode(lead), decode([*lead, *tokens])
    reached = progress(decode, [*lead, *tokens], whole)
    if not whole.startswith(known) or len(reached) != len(lead) + len(tokens):
        raise UnreadableError("the text of a token depends on those around it")
    text = whole[len(known) :]
    ends = [max(0, end - len(known)) for end in reached[len(lead) :]]
    # A token with a part of a character's bytes decodes to a mark when alone. A character may end between two such
    # tokens; assuming that none does makes some spans longer, and none wrong.
    marked = [alone(token).endswith(MARK) for token in tokens]
    after = [*(alone(token).startswith(MARK) for token in tokens[1:]), text.endswith(MARK)]
    return text, [CUT if a and b else end for end, a, b in zip(ends, marked, after, strict=False)]


def common(mine: Sequence[int], theirs: Sequence[int]) -> list[Span]:
    """Return the shortest spans at whose ends both have decoded the same characters.

    A token without characters belongs to the span of the next token, and at the end to no span.
    """
    ends = [{end: i + 1 for i, end in reversed(list(enumerate(side))) if end > 0} for side in (mine, theirs)]
    spans, begun = [], (0, 0)
    for end in sorted(ends[0].keys() & ends[1].keys()):
        here = ends[0][end], ends[1][end]
        spans.append((range(begun[0], here[0]), range(begun[1], here[1])))
        begun = here
    return spans


@dataclass(frozen=True)
class Aligned:
    """A response in the tokens of both."""

    spans: list[Span]
    teacher: list[int]
    """The teacher's tokens."""


def end_of_turn(tokenizer: Any, ends: set[int], template: str = "") -> int:
    """Return the token with which the chat template ends an answer, or else the tokenizer's end token.

    ends: all tokens that may end a response. template: replaces the tokenizer's own.
    """
    proved = end_of_turn_tokens(tokenizer, chosen_template(tokenizer, template))
    return next((token for token in proved if token in ends), tokenizer.eos_token_id)


class Pair:
    """Two tokenizers: aligns a student's responses with its teacher's tokens."""

    def __init__(self, student: Any, teacher: Any, ends: set[int], teacher_ends: set[int], template: str = ""):
        """Find the tokens with which both end a response.

        ends, teacher_ends: all tokens that may. template: the student's, if not its tokenizer's.
        """
        self.student, self.teacher, self.ends = student, teacher, ends
        self.last = end_of_turn(student, ends, template), end_of_turn(teacher, teacher_ends)
        """The two tokens with which student and teacher end a response."""
        self.control = set(student.all_special_ids) | ends, set(teacher.all_special_ids) | teacher_ends

    def align(self, tokens: list[int], prompt: Sequence[int] = ()) -> Aligned:
        """Encode a response in the teacher's tokens, and find the spans; end tokens correspond to each other.

        Raises:
            UnreadableError: it holds other control tokens, or text that one of the two does not reproduce.
        """
        ended = bool(tokens) and tokens[-1] in self.ends
        body = tokens[: len(tokens) - ended]
        if odd := [token for token in body if token in self.control[0]]:
            raise UnreadableError(f"the control token {self.student.convert_ids_to_tokens(odd[0])!r} stands in it")
        text, mine = reading(self.student, body, list(prompt)[-BEFORE:])
        if not ended:
            # A response may be cut off within a character.
            text = text[: max([0, *mine])]
        if MARK in text:
            raise UnreadableError("it has bytes that are not text")
        theirs = list(self.teacher(text, add_special_tokens=False).input_ids)
        if odd := [token for token in theirs if token in self.control[1]]:
            raise UnreadableError(f"the teacher reads its control token {self.teacher.convert_ids_to_tokens(odd[0])!r}")
        back, their_ends = reading(self.teacher, theirs)
        if back != text:
            at = next(
                (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back))
            )
            raise UnreadableError(f"the teacher reads {text[at : at + 10]!r} as {back[at : at + 10]!r}")
        spans = common(mine, their_ends)
        if ended:
            spans.append((range(len(body), len(tokens)), range(len(theirs), len(theirs) + 1)))
            theirs.append(self.last[1])
        return Aligned(spans, theirs)

    def both(self, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that both have, in the student's and the teacher's numbers, int64 [M] each.

        These are tokens of the same string, and the two that end a response. sizes: vocabulary sizes of the student's
        and the teacher's model, which may be smaller than those of their tokenizers.
        """
        mine, theirs = (
            {word: token for word, token in side.get_vocab().items() if token < size}
            for side, size in zip((self.student, self.teacher), sizes, strict=True)
        )
        pairs = [(mine[word], theirs[word]) for word in mine.keys() & theirs.keys()]
        last = self.last
        pairs = [last, *(pair for pair in pairs if pair[0] != last[0] and pair[1] != last[1])]
        student_M, teacher_M = torch.tensor(sorted(pairs), dtype=torch.int64).unbind(1)
        return student_M, teacher_M
