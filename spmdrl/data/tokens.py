"""Tokenizes a dialogue's sequences, or plain text, and builds their loss mask.

The text of a sequence is tokenized as a whole. If a token other than a control token would cross the start or end of a
turn, or if the tokenizer does not return offsets, the text is split at these boundaries and each piece is tokenized
separately. A turn then starts with a new token, as when a model generates it. The concatenated tokens must decode to
the same text.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from spmdrl.data.rendering import TemplateError
from spmdrl.spmd.payload import Payload


@dataclass
class Masked:
    """The L tokens of one sequence and their loss mask."""

    tokens: torch.Tensor
    """int64 [L]: the token ids."""
    mask: torch.Tensor
    """bool [L]: True for trained tokens. The first token is never trained, because nothing predicts it."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Additional values of the sequence, by name."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """Additional per-token values, by name: tensors [L]."""
    images: list[tuple[Payload, int, int]] = field(default_factory=list)
    """The images that the tokens show, in order, each with the first index of its tokens and the index after them."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Masked":
        """Return the first `count` tokens with their columns, and all numbers of the sequence.

        If this would cut an image, the sequence ends before the image.
        """
        count = min([count, *(begin for _, begin, end in self.images if begin < count < end)])
        columns = {name: column[:count] for name, column in self.columns.items()}
        images = [each for each in self.images if each[2] <= count]
        return Masked(self.tokens[:count], self.mask[:count], self.numbers, columns, images)


def masked(tokenizer: Any, text: str, trained: Many[tuple[int, int]]) -> Masked:
    """Tokenize rendered text without adding tokens.

    trained: character ranges to train on, ascending. Raises TemplateError if the text must be split at range boundaries
    and the tokens of the pieces decode to a different text.
    """
    offsets = None
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = found["input_ids"], found["offset_mapping"]
    if offsets is None or _crossed(tokenizer, ids, offsets, trained):
        return _in_pieces(tokenizer, text, trained)
    starts = torch.tensor([start for start, _ in offsets], dtype=torch.int64)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in trained:
        mask |= (starts >= start) & (starts < end)
    return _masked(ids, mask)


def _crossed(tokenizer: Any, ids: list[int], offsets: list[tuple[int, int]], trained: Many[tuple[int, int]]) -> bool:
    """Return True if a token crosses the boundary of a trained range.

    Control tokens may cross it, because some of them include adjacent whitespace.
    """
    borders = {place for pair in trained for place in pair}
    inner = ((token, start, end) for token, (start, end) in zip(ids, offsets, strict=True) if end - start > 1)
    return any(
        token not in tokenizer.added_tokens_decoder and any(start < place < end for place in borders)
        for token, start, end in inner
    )


def _in_pieces(tokenizer: Any, text: str, trained: Many[tuple[int, int]]) -> Masked:
    cuts = sorted({0, len(text), *(place for pair in trained for place in pair)})
    ids: list[int] = []
    flags: list[bool] = []
    for start, end in pairwise(cuts):
        piece = tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
        ids += piece
        flags += [any(a <= start and end <= b for a, b in trained)] * len(piece)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if _text(tokenizer, ids) != _text(tokenizer, whole):
        raise TemplateError(
            "a token lies across the border of a turn, and this tokenizer does not give the same text in pieces"
        )
    return _masked(ids, torch.tensor(flags, dtype=torch.bool))


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _masked(ids: list[int], mask: torch.Tensor) -> Masked:
    mask[:1] = False
    return Masked(torch.tensor(ids, dtype=torch.int64), mask)
