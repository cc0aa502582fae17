"""Runs test sequences with images, packed by our forward pass and one by one through plain transformers (`probe.py`).

Two sequences show one image, so that a tree shares it, and the third shows another image of the same size.
"""

from dataclasses import replace
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import COLUMN, with_images
from spmdrl.hub.images import forward_inputs, plain_image
from spmdrl.hub.vision import Vision
from spmdrl.policy.attention.packed import with_attention
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.payload import Payload

BEFORE, BEHIND = 3, (5, 8, 6)
"""Number of text tokens before the image, and behind the image of each sequence."""
SIDES = (2, 3)
"""Height and width of the images, in tokens; the tiled families take one tile."""


def random_image(vision: Vision, number: int) -> Payload:
    """Return an image of random pixels, the same on every rank. number: different numbers give different images."""
    plain = plain_image(vision, *(SIDES if vision.tile is None else ()), name=f"{number:032x}")
    return replace(plain, pixels=torch.randn(plain.pixels.shape, generator=torch.Generator().manual_seed(number)))


def image_batch(vision: Vision, ordinary: list[int]) -> Batch:
    """Return the test sequences. The mask is True behind the images. ordinary: ids of ordinary tokens."""
    images, draw = [random_image(vision, number) for number in (1, 2)], torch.Generator().manual_seed(7)
    shown = [images[0], images[0], images[1]]
    text = torch.tensor(ordinary)[torch.randint(len(ordinary), (BEFORE + sum(BEHIND),), generator=draw)]
    before, *behind = text.split([BEFORE, *BEHIND])
    rows = [
        torch.cat([before, torch.full((image.tokens,), vision.image), after])
        for image, after in zip(shown, behind, strict=True)
    ]
    masks = [torch.arange(len(row)) >= len(row) - count for row, count in zip(rows, BEHIND, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    batch = Batch(lengths, {"tokens": torch.cat(rows), "mask": torch.cat(masks)})
    return with_images(batch, [(image,) for image in shown], vision.image)


@torch.no_grad()
def image_states(policy: Any, ordinary: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states behind the images from our forward pass and from plain transformers, both [n, D].

    Collective. The policy's model must read images. ordinary: ids of ordinary tokens.
    """
    model, vision, device = policy.model, policy.model.vision, policy.world.device
    batch = image_batch(vision, ordinary)
    tokens, mask = batch.token["tokens"], batch.token["mask"]
    seen = {"images": batch.images, "mark_T": batch.token[COLUMN]}
    ours = model.states(model.plan(tokens, batch.lengths, mask, before=False, **seen))
    base, theirs = model.hf.base_model, []
    for ids, images in zip(tokens.split(batch.lengths.tolist()), batch.images or [], strict=True):
        given = {"input_ids": ids[None]} | forward_inputs(images, vision)
        if vision.mrope:
            given["mm_token_type_ids"] = (ids[None] == vision.image).int()
        with with_attention(model.hf, "eager"):
            theirs.append(base(**to_device(given, device), use_cache=False).last_hidden_state[0])
    if vision.mrope:
        # transformers keeps positions of the last image for a decoding that does not follow here.
        base.rope_deltas = None
    return ours[mask], torch.cat(theirs)[mask]
