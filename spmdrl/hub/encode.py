"""Runs the vision tower of a model, once for each image, and gives every placeholder token its feature.

transformers' own code computes everything. `features_of` calls a model's `get_image_features`, and `arguments` returns
the features of some tokens in the form in which the model's forward takes features that are already computed. So an
image that several sequences show is encoded once, and a forward over some of the tokens gets the features of these.

Shapes: F features of all encoded images, n placeholder tokens of a forward pass, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmdrl.hub.build import sees_images
from spmdrl.hub.images import forward_inputs, plain_image
from spmdrl.hub.vision import Vision, read_vision
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.payload import Payload


@dataclass(frozen=True, eq=False)
class Seen:
    """The images that one forward pass of the transformer reads."""

    images: list[Payload]
    """Distinct images, in the order in which they first occur."""
    features_n: torch.Tensor
    """int64 [n]: the feature, 0 .. F - 1, for each placeholder token that this rank runs."""


NOTHING = Seen([], torch.zeros(0, dtype=torch.int64))
"""No image, for sequences of text."""


def vision_of(hf: Any) -> Vision | None:
    """Return the facts of an HF model that was built with a vision tower, or None for other models."""
    if not sees_images(hf.config):
        return None
    vision, modules = read_vision(hf.config), dict(hf.named_modules())
    return vision if vision.tower in modules else None


def in_order(images: Sequence[Payload]) -> Seen:
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


def features_of(hf: Any, vision: Vision, images: list[Payload], device: torch.device) -> Any:
    """Run the vision tower on images, or on a stand-in image if there are none.

    Returns an output of transformers with the features `pooler_output` [F, D], and for deepstack `deepstack_features`,
    a list of [F, D]. Raises ValueError if their number is not that of the images' tokens.
    """
    # Ranks without images run the tower only because other ranks need its shards.
    images = images or [plain_image(vision)]
    given, wanted = to_device(forward_inputs(images, vision), device), sum(image.tokens for image in images)
    out = hf.base_model.get_image_features(**given, return_dict=True)

    def flat(features: Any) -> torch.Tensor:
        # The features are one tensor per image, or one tensor for all tiles.
        flat_FD = features.flatten(0, 1) if torch.is_tensor(features) else torch.cat(list(features))
        if len(flat_FD) != wanted:
            raise ValueError(
                f"the model computes {len(flat_FD)} features for images whose tokens need {wanted}: their tokens are "
                "those of another model (all models of a job must read images alike)"
            )
        return flat_FD

    # The last hidden state of the tower is needed no more, and an engine can hold features for long.
    fields: dict[str, Any] = {"last_hidden_state": None, "pooler_output": flat(out.pooler_output)}
    if vision.deepstack:
        fields["deepstack_features"] = [flat(layer) for layer in out.deepstack_features]
    return replace(out, **fields)


def arguments(features: Any, features_n: torch.Tensor, vision: Vision) -> dict[str, Any]:
    """Return the arguments of a model's forward that hold the features of its placeholder tokens.

    features: from `features_of`. features_n: int64 [n] on their device, as in `Seen`, in the order of the tokens.
    """

    def mine(flat_FD: torch.Tensor) -> torch.Tensor:
        return flat_FD.index_select(0, features_n) if len(features_n) else flat_FD[:0]

    # A tiled family takes one tensor, [tiles, features of a tile, D]; with one feature per tile, any number fits.
    features_nD = mine(features.pooler_output)
    fields: dict[str, Any] = {"pooler_output": features_nD[:, None] if vision.tile is not None else (features_nD,)}
    if vision.deepstack:
        fields["deepstack_features"] = [(mine(layer_FD),) for layer_FD in features.deepstack_features]
    return {"mm_encoder_outputs": {"image": replace(features, **fields)}}


def encode(hf: Any, vision: Vision, seen: Seen, device: torch.device) -> dict[str, Any]:
    """Run the vision tower; return the arguments of the model's forward that hold the features of this rank's tokens.

    Without images, the tower runs on a stand-in image and the result has no features, so it does not change the model's
    outputs, and the gradient of the tower is 0.
    """
    features = features_of(hf, vision, seen.images, device)
    return arguments(features, to_device(seen.features_n, device), vision)
