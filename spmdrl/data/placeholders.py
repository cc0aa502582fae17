"""Marks the placeholder tokens of images in a batch.

All placeholder tokens have the same id, whichever image they stand for. The token column `image`, int64 [T],
distinguishes the images. It is 0 at text tokens. At an image's placeholder tokens, it is the image's positive mark.
The mark depends on the image's content and on how many images precede it in its sequence, so that sequences with
equal tokens and marks show the model the same images.
"""

import hashlib
from collections.abc import Sequence

import torch

from spmdrl.data.batch import Batch
from spmdrl.spmd.payload import Payload

COLUMN = "image"


def mark_of(name: str, index: int) -> int:
    """Return the mark, in 1 .. 2**63 - 1, of the image `name` (its content hash) that follows `index` images."""
    digest = hashlib.blake2b(f"{index} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1


def marks_of(payloads: Sequence[Payload], here_L: torch.Tensor) -> torch.Tensor:
    """Return the column `image` of one sequence, int64 [L]. here_L: bool [L], True at the placeholders of payloads."""
    out_L = torch.zeros(len(here_L), dtype=torch.int64)
    marks = torch.tensor([mark_of(payload.name, i) for i, payload in enumerate(payloads)], dtype=torch.int64)
    out_L[here_L] = torch.repeat_interleave(marks, torch.tensor([p.tokens for p in payloads], dtype=torch.int64))
    return out_L


def with_images(batch: Batch, images: list[tuple[Payload, ...]], placeholder: int) -> Batch:
    """Return a batch that also holds the images of its sequences.

    batch: expanded, so that each image has as many placeholder tokens as the model has features for it. images: the
    payloads of each sequence, in the order of their tokens. placeholder: id of the placeholder token.

    Raises:
        ValueError: a sequence has more or fewer placeholder tokens than its images need.
    """
    assert len(images) == len(batch), "one tuple of payloads per sequence"
    here_T = batch.token["tokens"] == placeholder
    wanted_B = torch.tensor([sum(payload.tokens for payload in row) for row in images], dtype=torch.int64)
    found_B = torch.zeros_like(wanted_B).index_add_(0, batch.seq_index, here_T.long())
    if not torch.equal(wanted_B, found_B):
        row = int(torch.nonzero(wanted_B != found_B)[0])
        raise ValueError(
            f"sequence {row} has {int(found_B[row])} placeholder tokens for images, but its {len(images[row])} images "
            f"need {int(wanted_B[row])}: prompts must be expanded, must not be cut inside an image, and placeholders "
            "must not be sampled"
        )
    rows = zip(images, here_T.split(batch.lengths.tolist()), strict=True)
    mark_T = torch.cat([here_T[:0].long(), *(marks_of(row, here_L) for row, here_L in rows)])
    out = batch.like(**{COLUMN: mark_T})
    # Plans made before the images were known are wrong.
    out.plans = {}
    out.images = images
    return out


def distinct_tokens(tokens_L: torch.Tensor, mark_L: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens of a sequence with a negative number for each placeholder, which depends on the image.

    So sequences that show different images are different. The numbers fit into int32. mark_L: the column `image`, or
    None without images.
    """
    if mark_L is None:
        return tokens_L
    # Each placeholder of an image holds other bits of the mark.
    bits_L = (mark_L >> torch.arange(len(mark_L)) % 32) & (2**31 - 1)
    return torch.where(mark_L > 0, -1 - bits_L, tokens_L)


def refuse_images(batch: Batch, what: str) -> None:
    """Raise ValueError if a sequence of the batch has images. what: the part of spmdrl that does not support them."""
    if batch.images is not None and any(batch.images):
        raise ValueError(f"{what} does not support images: leave it out, or train on prompts without images")


def whole(length: int, mark_L: torch.Tensor) -> int:
    """Shorten a prefix of a sequence, int64 [L] marks, to `length` tokens or to the start of the image that it cuts."""
    later = mark_L[length:]
    cut = torch.nonzero(torch.isin(mark_L[:length], later[later > 0])).flatten()
    return int(cut[0]) if len(cut) else length


def shown_in(batch: Batch) -> list[tuple[tuple[int, Payload], ...]]:
    """Return the images of each sequence, each with the index of its first placeholder in the sequence."""
    if batch.images is None:
        return [()] * len(batch)
    rows = batch.token[COLUMN].split(batch.lengths.tolist())
    pairs = zip(rows, batch.images, strict=True)
    return [tuple((int(at[0]), image) for image, at in places(mark_L, [images])) for mark_L, images in pairs]


def places(mark_T: torch.Tensor, images: list[tuple[Payload, ...]]) -> list[tuple[Payload, torch.Tensor]]:
    """Return each image's payload and the indices of its tokens in the packed batch, int64 [n], in packed order."""
    payloads = [payload for row in images for payload in row]
    found = torch.nonzero(mark_T).flatten()
    assert len(found) == sum(payload.tokens for payload in payloads), "marks and images of a batch disagree"
    return list(zip(payloads, found.split([payload.tokens for payload in payloads]), strict=True))
