"""Encodes responses with the tokenizer of a reward model (`Rewriter`) or of a teacher (`Pair`).

A policy can write text that the reward model's tokenizer parses as a special token. Such text could end the policy's
turn and start another role's turn, so `Rewriter` breaks it up with a blank. `Pair` finds text spans that end at a token
boundary in both tokenizations.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from spmdrl.data.chat import chosen_template, variables
from spmdrl.data.prompts import Prompt
from spmdrl.data.steps import MARK, progress, tokens_of_ends
from spmdrl.data.template_ends import end_of_turn_tokens
from spmdrl.hub.tokenizer import BROKEN, control_words

PLACEHOLDER = "\ue000"
"""A private-use character that is rendered instead of an answer, to locate the answer in a template."""
CUT = -1
"""Replaces the end offset of a token that ends in the middle of a character."""
BEFORE = 4
"""Number of prompt tokens to decode together with a response, because some tokenizers drop a leading blank."""

Span = tuple[range, range]
"""Ranges of student tokens and teacher tokens, both as indices into the response."""


class Rewriter:
    """Encodes a prompt and a response with a reward model's tokenizer."""

    def __init__(self, tokenizer: Any, prefix: str, pad: int | None):
        """tokenizer: the reward model's tokenizer. prefix: start of error messages.

        pad: padding token; as in transformers, the score is read at the last non-padding token.
        """
        self.tokenizer, self.prefix, self.pad = tokenizer, prefix, pad
        self.control = control_words(tokenizer)

    def check(self, prompts: list[Prompt]) -> None:
        """Check that prompts can be rendered in the reward model's tokens.

        Raises:
            ValueError: a prompt has images, or is a chat and the tokenizer has no chat template.
        """
        if (row := next((prompt.index for prompt in prompts if prompt.images), None)) is not None:
            raise ValueError(
                f"{self.prefix}: a reward model with its own tokens reads text only, and prompts have images (the "
                f"first is row {row}): take a model with the policy's tokenizer, and tokenizer auto"
            )
        if any(prompt.chat for prompt in prompts) and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"{self.prefix}: the prompts are chats, and the reward model's tokenizer has no chat template: put one "
                "into its folder (chat_template.jinja), or take --data.chat off"
            )

    def whole(self, prompt: Prompt, response: str) -> tuple[list[int], int]:
        """Return the tokens of a prompt with its response, and the index of the token that HF models score."""
        tokens = self._tokens(prompt, self._text(prompt, prompt.reply + self.control.sub(BROKEN, response)))
        # As in transformers, the score is read at the last non-padding token, or at the first token if all are padding.
        return tokens, next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] != self.pad), 0)

    def stepwise(self, prompt: Prompt, response: str, ends: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with its response, and the index of the token that ends each step.

        ends: character offset in the response where each step ends (`step_ends`).

        Raises:
            ValueError: the chat template omits responses, or the tokens cannot be located in the text.
        """
        blanks = [found.end() for found in self.control.finditer(response)]
        ends = [end + bisect_left(blanks, end) for end in ends]
        reply = prompt.reply + self.control.sub(BROKEN, response)
        text, kept, begin = self._located(prompt, reply)
        tokens = self._tokens(prompt, text)
        if not kept:
            return tokens, [len(tokens) - 1] * len(ends)
        lead = reply.index(kept)
        places = [begin + min(max(len(prompt.reply) + end - lead, 1), len(kept)) for end in ends]
        return tokens, self._holding(tokens, text, places, prompt.chat)

    def _text(self, prompt: Prompt, reply: str) -> str:
        """Return the text of a prompt with a reply. Chats are rendered without a generation prompt."""
        content = prompt.content
        if not prompt.chat:
            # Without a chat template, a prompt is plain text or a single user message (`data.chat.encode` rejects
            # others).
            return (content if isinstance(content, str) else content[0]["content"]) + reply
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        try:
            return self.tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": reply}],
                tokenize=False,
                add_generation_prompt=False,
                tools=prompt.tools,
                **variables(prompt.more),
            )
        except Exception as error:  # jinja has its own exceptions, and templates may raise any
            raise ValueError(
                f"{self.prefix}: its chat template could not render prompt {prompt.index} with its response "
                f"({type(error).__name__}: {error})"
            ) from error

    def _located(self, prompt: Prompt, reply: str) -> tuple[str, str, int]:
        """Return the full text that the model reads, the reply as it appears in that text, and the reply's offset."""
        text = self._text(prompt, reply)
        if not prompt.chat:
            return text, reply, len(text) - len(reply)
        head, found, tail = self._text(prompt, PLACEHOLDER).rpartition(PLACEHOLDER)
        if not found:
            raise ValueError(
                f"{self.prefix}: its chat template leaves out the assistant's answer; give the model another template"
            )
        # Templates may strip white space around an answer.
        for kept in (reply, reply.strip(), reply.lstrip(), reply.rstrip()):
            if text == head + kept + tail:
                return text, kept, len(head)
        # The template moves or drops a part of this answer, such as a thought; use the answer as it was sampled.
        return head + reply + tail, reply, len(head)

    def _tokens(self, prompt: Prompt, text: str) -> list[int]:
        # A rendered chat already contains all special tokens.
        tokens = list(self.tokenizer(text, add_special_tokens=not prompt.chat).input_ids)
        if not tokens:
            raise ValueError(
                f"{self.prefix}: its tokenizer returns no tokens for prompt {prompt.index} with its response, the text "
                f"{text[:40]!r}, so there is nothing to score: leave the prompt out, or take another model"
            )
        return tokens

    def _holding(self, tokens: list[int], text: str, places: list[int], chat: bool) -> list[int]:
        """Return the index of the token that contains the character before each offset in `places`."""

        def decode(some: list[int]) -> str:
            return self.tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        # Byte-level tokenizers report offsets without white space, so use offsets only if decoding does not reproduce
        # the text.
        shift = decode(tokens).find(text)
        if shift >= 0:
            return tokens_of_ends(decode, tokens, [shift + place for place in places])
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{self.prefix}: its tokenizer neither decodes tokens to the text that it encoded nor returns the "
                "tokens' offsets: add a tokenizer.json to the model's folder"
            )
        spans = self.tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)["offset_mapping"]
        # Special tokens that are not in the text have empty spans.
        return [max(i for i, (a, b) in enumerate(spans) if a < place and b > a) for place in places]


class UnreadableError(Exception):
    """A response cannot be aligned; the message is the reason."""


def reading(tokenizer: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[str, list[int]]:
    """Decode tokens, and return the text and the character offset where each token ends (or CUT).

    before: tokens that precede these tokens.

    Raises:
        UnreadableError: the text of some tokens depends on other tokens.
    """

    def decode(some: list[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    lead = list(before)
    alone = cache(lambda token: decode([token]))
    known, whole = decode(lead), decode([*lead, *tokens])
    reached = progress(decode, [*lead, *tokens], whole)
    if not whole.startswith(known) or len(reached) != len(lead) + len(tokens):
        raise UnreadableError("the text of a token depends on the tokens around it")
    text = whole[len(known) :]
    ends = [max(0, end - len(known)) for end in reached[len(lead) :]]
    # A token with only some of a character's bytes decodes to a replacement mark on its own. Assume that no character
    # ends between two such tokens. If one does, some spans are longer than necessary, but still correct.
    marked = [alone(token).endswith(MARK) for token in tokens]
    after = [*(alone(token).startswith(MARK) for token in tokens[1:]), text.endswith(MARK)]
    return text, [CUT if a and b else end for end, a, b in zip(ends, marked, after, strict=False)]


def common(mine: Sequence[int], theirs: Sequence[int]) -> list[Span]:
    """Return the shortest text spans that end at a token boundary of both the student and the teacher.

    A token without text belongs to the next token's span, or to no span at the end of the response.

    mine, theirs: character offsets where the student's and the teacher's tokens end.
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
    """A response in the teacher's tokens, and the text spans that consist of whole tokens in both tokenizations."""

    spans: list[Span]
    teacher: list[int]
    """The response in the teacher's tokens."""


def end_of_turn(tokenizer: Any, ends: set[int], template: str = "") -> int:
    """Return the token that ends an answer in the chat template, or the tokenizer's end token if there is none.

    ends: all tokens that may end a response. template: overrides the tokenizer's chat template if set.
    """
    proved = end_of_turn_tokens(tokenizer, chosen_template(tokenizer, template))
    return next((token for token in proved if token in ends), tokenizer.eos_token_id)


class Pair:
    """Aligns a student's responses with the tokens of a teacher that has a different tokenizer."""

    def __init__(self, student: Any, teacher: Any, ends: set[int], teacher_ends: set[int], template: str = ""):
        """Find the end-of-response tokens of the student and the teacher.

        ends, teacher_ends: all tokens that may end the student's or the teacher's response. template: the student's
        chat template, if it overrides the tokenizer's.
        """
        self.student, self.teacher, self.ends = student, teacher, ends
        self.last = end_of_turn(student, ends, template), end_of_turn(teacher, teacher_ends)
        """The student's and the teacher's end-of-response token."""
        self.control = set(student.all_special_ids) | ends, set(teacher.all_special_ids) | teacher_ends

    def align(self, tokens: list[int], prompt: Sequence[int] = ()) -> Aligned:
        """Encode a response with the teacher's tokenizer, and find the spans. The end token forms the last span.

        Raises:
            UnreadableError: the response contains other control tokens, or text that a tokenizer does not reproduce.
        """
        ended = bool(tokens) and tokens[-1] in self.ends
        body = tokens[: len(tokens) - ended]
        if odd := [token for token in body if token in self.control[0]]:
            raise UnreadableError(f"it contains the control token {self.student.convert_ids_to_tokens(odd[0])!r}")
        text, mine = reading(self.student, body, list(prompt)[-BEFORE:])
        if not ended:
            # A response may be cut off in the middle of a character.
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

    def both(
        self, sizes: tuple[int, int], excluded: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the student's and the teacher's ids of the M common tokens, int64 [M] each.

        Common tokens have the same string in both vocabularies. The two end-of-response tokens also count as common.

        sizes: vocabulary sizes of the student model and the teacher model, which may be smaller than those of their
        tokenizers. excluded: ids of student and teacher that do not count, because they have probability 0.
        """
        mine, theirs = (
            {word: token for word, token in side.get_vocab().items() if token < size and token not in left_out}
            for side, size, left_out in zip((self.student, self.teacher), sizes, excluded, strict=True)
        )
        pairs = [(mine[word], theirs[word]) for word in mine.keys() & theirs.keys()]
        last = self.last
        pairs = [last, *(pair for pair in pairs if pair[0] != last[0] and pair[1] != last[1])]
        student_M, teacher_M = torch.tensor(sorted(pairs), dtype=torch.int64).unbind(1)
        return student_M, teacher_M
