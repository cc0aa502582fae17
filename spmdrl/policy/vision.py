"""Images in the forward pass of a packed batch: whose features are computed, and which token gets which feature.

transformers' own code computes everything. `encode` calls a model's `get_image_features` and returns the output in the
form in which the model's forward takes features that are already computed. So an image that occurs several times in a
batch is encoded once, a rank that runs a slice of the tokens gives the forward the features of this slice, and a batch
without images can run the vision tower without using its features.

Shapes: R tokens that the transformer runs, S tokens in this rank's slice of them, F features of all encoded images, n
placeholder tokens in the slice, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import COLUMN, places
from spmdrl.hub.build import sees_images
from spmdrl.hub.expand import positions
from spmdrl.hub.images import forward_inputs
from spmdrl.hub.vision import QWEN, TILED, Vision, read_vision
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.payload import Payload

Passes = tuple[int, bool]
"""How often a micro-batch is run (`passes`)."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The images that one forward pass of the transformer reads."""

    images: list[Payload]
    """Distinct images, in the order in which they first occur."""
    features_n: torch.Tensor
    """int64 [n]: the feature, 0 .. F - 1, for each placeholder token in this rank's slice."""


NOTHING = Seen([], torch.zeros(0, dtype=torch.int64))
"""No image, for sequences of text."""


def vision_of(hf: Any) -> Vision | None:
    """Return the facts of an HF model that was built with a vision tower, or None for other models."""
    if not sees_images(hf.config):
        return None
    vision, modules = read_vision(hf.config), dict(hf.named_modules())
    return vision if vision.tower in modules else None


# ── plans ────────────────────────────────────────────────────────────────────


def in_order(images: list[Payload]) -> Seen:
    """Return what a forward pass sees that runs tokens with these images, in the order of their tokens."""
    first: dict[str, int] = {}
    distinct, features = [], 0
    for image in images:
        if image.name not in first:
            first[image.name] = features
            features += image.tokens
            distinct.append(image)
    rows = [first[image.name] + torch.arange(image.tokens) for image in images]
    return Seen(distinct, torch.cat(rows)) if rows else NOTHING


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


# ── forward ──────────────────────────────────────────────────────────────────


def stand_in_image(vision: Vision) -> Payload:
    """Return the smallest image, for ranks that run the vision tower only because other ranks need its shards."""
    if vision.tile is not None:
        # transformers takes an image of zeros for padding.
        return Payload("", torch.ones(1, 3, vision.tile, vision.tile), vision.tile_tokens, tiles=(0, 0))
    side = vision.merge
    return Payload("", torch.zeros(side**2, 3 * vision.frames * vision.patch**2), 1, grid=(1, side, side))


def encode(hf: Any, vision: Vision, seen: Seen, device: torch.device) -> dict[str, Any]:
    """Run the vision tower; return the arguments of the model's forward that hold the features of this rank's tokens.

    Without images, the tower runs on a stand-in image and the result has no features, so it does not change the model's
    outputs, and the gradient of the tower is 0.
    """
    given = to_device(forward_inputs(seen.images or [stand_in_image(vision)], vision), device)
    rows_n = to_device(seen.features_n, device)
    wanted = sum(image.tokens for image in seen.images or [stand_in_image(vision)])
    out = hf.base_model.get_image_features(**given, return_dict=True)

    def mine(features: Any) -> torch.Tensor:
        # The features are one tensor per image, or one tensor for all tiles.
        flat_FD = features.flatten(0, 1) if torch.is_tensor(features) else torch.cat(list(features))
        if len(flat_FD) != wanted:
            raise ValueError(
                f"the model computes {len(flat_FD)} features for images whose tokens need {wanted}: their tokens are "
                "those of another model (--model.path, --teacher.path, --reference.path must read images alike)"
            )
        return flat_FD.index_select(0, rows_n) if len(rows_n) else flat_FD[:0]

    # A tiled family takes one tensor, [tiles, features of a tile, D]; with one feature per tile, any number fits.
    features_nD = mine(out.pooler_output)
    out.pooler_output = features_nD[:, None] if vision.tile is not None else (features_nD,)
    if vision.deepstack:
        out.deepstack_features = [(mine(layer),) for layer in out.deepstack_features]
    return {"mm_encoder_outputs": {"image": out}}


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


# ── parts ────────────────────────────────────────────────────────────────────


def part_of(name: str, vision: Vision) -> str:
    """Return the part that a parameter belongs to: `vision`, `projector` or `language`. name: its HF name."""
    # The projectors of some families are inside the tower.
    if name.startswith(tuple(f"{module}." for module in vision.projector)):
        return "projector"
    return "vision" if name.startswith(f"{vision.tower}.") else "language"


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
