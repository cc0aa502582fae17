"""Gives vLLM the images of requests as it would get them from a processor of its own.

Prompts are expanded already and pixels are those that the trainer reads (`hub/expand.py`, `hub/images.py`), so vLLM
expands and processes nothing. Images have the names of their payloads, by which vLLM's caches of prefixes and of image
features tell them apart. Written against vLLM 0.32, and checked against the code of 0.25.1.
"""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from spmdrl.hub.images import plain_image
from spmdrl.hub.vision import Vision
from spmdrl.spmd.payload import Payload

KEY = "image"
"""vLLM's name for images among its kinds of media."""


class Images:
    """Makes vLLM's inputs for one model. Images that several running requests show are held once."""

    def __init__(self, vision: Vision, dtype: torch.dtype):
        """dtype: dtype of vLLM's model, to which transformers' models round pixels as well."""
        self.vision, self.dtype = vision, dtype
        self.items: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def prompt(self, ids: list[int], images: Sequence[Payload]) -> dict[str, Any]:
        """Return vLLM's input for a prompt of expanded ids and its images, in the order of their placeholders.

        Raises:
            ValueError: see `places_of`.
        """
        places = places_of(ids, images, self.vision)
        if not images:
            return {"type": "token", "prompt_token_ids": ids}
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ranges = [PlaceholderRange(at, len(mask), None if all(mask) else torch.tensor(mask)) for at, mask in places]
        counts = [each.get_num_embeds() for each in ranges]
        assert counts == [image.tokens for image in images], f"vLLM counts {counts} image features"
        return {
            "type": "multimodal",
            "prompt_token_ids": ids,
            "mm_kwargs": MultiModalKwargsItems({KEY: [self._item(image) for image in images]}),
            "mm_hashes": {KEY: [image.name for image in images]},
            "mm_placeholders": {KEY: ranges},
        }

    def _item(self, image: Payload) -> Any:
        item = self.items.get(image.name)
        if item is None:
            item = self.items[image.name] = _item_of(image, self.vision, self.dtype)
        return item


def _item_of(image: Payload, vision: Vision, dtype: torch.dtype) -> Any:
    """Return vLLM's form of an image: the arguments of its model, and how those of several images are joined."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    # The slices serve to cut joined tensors into images, which never happens here.
    joined, stacked = MultiModalFlatField(slices=[slice(None)]), MultiModalBatchedField(keep_on_cpu=True)
    pixels = image.pixels.to(dtype)
    if vision.tile is None:
        values = {"pixel_values": (pixels, joined), "image_grid_thw": (torch.tensor(image.grid), stacked)}
    else:
        mask = torch.ones(len(pixels), vision.tile, vision.tile, dtype=torch.int64)
        values = {
            "pixel_values": (pixels, joined),
            "pixel_attention_mask": (mask, joined),
            "num_patches": (torch.tensor(len(pixels)), stacked),
        }
    return MultiModalKwargsItem({name: MultiModalFieldElem(data, field) for name, (data, field) in values.items()})


def places_of(ids: Sequence[int], images: Sequence[Payload], vision: Vision) -> list[tuple[int, list[bool]]]:
    """Return each image's place in expanded ids: the index of its first placeholder, and a mask that is True for
    placeholders and ends with the last one. Other tokens of the mask are the marks of tiles.

    Ids and images are those of a request that passed `check_request`.

    Raises:
        ValueError: other tokens split an image that has no tiles.
    """
    found = [at for at, token in enumerate(ids) if token == vision.image]
    assert len(found) == sum(image.tokens for image in images), "`check_request` compares the numbers of features"
    out, done = [], 0
    for image in images:
        mine, done = found[done : done + image.tokens], done + image.tokens
        mask = [token == vision.image for token in ids[mine[0] : mine[-1] + 1]]
        if vision.tile is None and not all(mask):
            raise ValueError(f"the {image.tokens} placeholders of an image from token {mine[0]} on have others between")
        out.append((mine[0], mask))
    return out


def plain_prompt(tokens: int, vision: Vision) -> tuple[list[int], Payload]:
    """Return expanded ids that show one image of plain colour, without marks, and the image.

    The image has as many features as fit into `tokens`, but at least those of one patch or tile.
    """
    if vision.tile is None:
        rows = max(math.isqrt(tokens), 1)
        image = plain_image(vision, rows, max(tokens // rows, 1), f"plain {tokens}")
    else:
        image = plain_image(vision, max(tokens // vision.tile_tokens, 1), name=f"plain {tokens}")
    return [vision.image] * image.tokens, image
