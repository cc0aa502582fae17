"""Images in the forward pass of a packed batch: whose features are computed, and which token gets which feature.

`hub/encode.py` runs the vision tower. An image that occurs several times in a batch is encoded once, a rank that runs a
slice of the tokens gives the forward the features of this slice, and a batch without images can run the vision tower
without using its features.

Shapes: R tokens that the transformer runs, T packed tokens.
"""

from typing import Any

import torch
import torch.distributed as dist

from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import COLUMN, places
from spmdrl.hub.encode import NOTHING, Seen, in_order
from spmdrl.hub.expand import positions
from spmdrl.hub.vision import QWEN, TILED, Vision, part_of
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.payload import Payload

Passes = tuple[int, bool]
"""How often a micro-batch is run (`passes`)."""


def seen_in(
    images: list[tuple[Payload, ...]], mark_T: torch.Tensor, place_T: torch.Tensor | None, part: TokenSlice
) -> Seen:
    """Return what a forward pass over a packed batch or its tree sees.

    images: per sequence. mark_T: int64 [T], `data/placeholders.py`. place_T: int64 [T], each packed token's index in
    the tree, or None without a tree. part: this rank's slice of the R tokens.
    """
    found: dict[int, tuple[Payload, torch.Tensor]] = {}
    for image, at in places(mark_T, images):
        at = at if place_T is None else place_T[at]
        # Images at the same place in the tree are the same image.
        found.setdefault(int(at[0]), (image, at))
    ordered = [found[place] for place in sorted(found)]
    if not ordered:
        return NOTHING
    seen, at = in_order([image for image, _ in ordered]), torch.cat([at for _, at in ordered])
    assert bool((at.diff() > 0).all()), "the tokens of an image are in one node of the tree"
    here, _ = part.within(at)
    return Seen(seen.images, seen.features_n[here])


def positions_of(
    tokens_T: torch.Tensor, lengths_B: torch.Tensor, images: list[tuple[Payload, ...]], vision: Vision
) -> torch.Tensor | None:
    """Return positions of packed tokens along time, row and column, int64 [T, 3], or None if they are as for text."""
    if not vision.mrope or not any(images):
        return None
    rows = zip(tokens_T.split(lengths_B.tolist()), images, strict=True)
    return torch.cat([positions(ids, row, vision) for ids, row in rows], 1).T


def check_images(batch: Batch, vision: Vision | None) -> None:
    """Raise ValueError if a model cannot read the images of a batch, or if there are placeholders without an image.

    vision: facts of the model, or None if it reads no images.
    """
    if vision is None:
        if batch.images is not None and any(batch.images):
            raise ValueError(
                "the batch has images, but this model does not read images, or not with this --policy.backend: take "
                f"--policy.backend fsdp and a model of type {', '.join([*QWEN, *TILED])}, or rows without images"
            )
        return
    if "noise" in batch.token and any(batch.images or ()):
        raise ValueError("--sft.neftune adds no noise to embeddings of images: leave it out, or train on text only")
    if batch.images is None:
        # Without images, transformers embeds a placeholder as any other token.
        return
    stray_T = (batch.token["tokens"] == vision.image) & (batch.token[COLUMN] == 0)
    if bool(stray_T.any()):
        raise ValueError(
            f"{int(stray_T.sum())} tokens are placeholders of images (id {vision.image}) but belong to no image; these "
            "tokens must not be sampled and must not occur in the text of prompts"
        )


def passes(
    micros: list[Batch], apart: bool, sees: bool, group: dist.ProcessGroup | None, device: torch.device
) -> list[Passes]:
    """Agree over ranks on the forward pass of each micro-batch. Collective if `apart` or `sees`.

    apart: every sequence is a separate forward pass. sees: the batches have lists of images, as on all other ranks.
    Returns, for each micro-batch, the maximum number of separate passes (0 unless `apart`), and whether any rank's has
    images. Every pass all-gathers shards, so all ranks must run the same number, and must run the vision tower in the
    same ones.
    """
    if not micros or not (apart or sees):
        return [(0, False)] * len(micros)
    counts = [[max(len(m), 1) * apart, sees and any(m.images or ())] for m in micros]
    found = all_reduce(torch.tensor(counts, dtype=torch.int64, device=device), "max", group).tolist()
    return [(forwards, bool(looks)) for forwards, looks in found]


def frozen_names(hf: Any, vision: Vision | None, freeze: tuple[str, ...], path: str) -> set[str]:
    """Return the names of the parameters that `--model.freeze` (here `freeze`) freezes.

    hf: the model. path: its path, for messages. Raises ValueError if the model lacks the named parts.
    """
    if not freeze:
        return set()
    if vision is None:
        raise ValueError(
            f"--model.freeze {' '.join(freeze)}: {path} is not a vision-language model that spmdrl supports, so it has "
            "no such part; leave out the flag"
        )
    return {name for name, _ in hf.named_parameters() if part_of(name, vision) in freeze}
