"""Expands one placeholder per image into one per image feature, and computes position ids of expanded sequences.

Chat templates write unexpanded ids. They are expanded here when a sequence is made, and never again: episodes, requests
and batches hold expanded ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.hub.vision import MOST_TILES, Vision
from spmdrl.spmd.payload import Payload


@dataclass(frozen=True, eq=False)
class Expanded:
    """A sequence with T expanded ids."""

    ids: torch.Tensor
    """int64 [T]."""
    origin: torch.Tensor
    """int64 [T]: the index in the unexpanded sequence that each token comes from, for columns such as masks."""
    spans: list[tuple[int, int]]
    """First index, and index behind the last, of the tokens of each image, marks of its tiles included."""
    firsts: list[int]
    """Index of the first placeholder of each image."""


def image_tokens(image: Payload, vision: Vision) -> list[int]:
    """Return the ids that replace an image's placeholder.

    Raises ValueError if a tiled family's facts were read without a tokenizer, or if the image has too many tiles.
    """
    if image.tiles is None:
        return [vision.image] * image.tokens
    marks = vision.marks
    if marks is None:
        raise ValueError(f"the marks of {vision.model_type} stand in its tokenizer: give it to read_vision")
    rows, columns = image.tiles
    if max(rows, columns) > MOST_TILES:
        raise ValueError(
            f"an image has {rows} x {columns} tiles, {vision.model_type} has marks for {MOST_TILES} x {MOST_TILES}: "
            "lower size in preprocessor_config.json"
        )
    run, out = [vision.image] * vision.tile_tokens, []
    for row in range(rows):
        for column in range(columns):
            out += [marks.fence, *marks.tiles[row][column], *run]
        out += marks.last_row_end if row == rows - 1 else marks.row_end
    return [*out, marks.fence, *marks.whole, *run, marks.fence]


def expand(ids: Sequence[int] | torch.Tensor, images: Sequence[Payload], vision: Vision) -> Expanded:
    """Replace the placeholder of each image by its tokens, as transformers' processor does for the text and the images.

    `ids` are the L unexpanded ids of one sequence, `images` its images in order. Raises ValueError if the numbers of
    placeholders and images differ, if ids are expanded already, and for the placeholder of a video.
    """
    ids_L = torch.as_tensor(ids, dtype=torch.int64)
    found = (ids_L == vision.image).nonzero().flatten().tolist()
    _check_unexpanded(ids_L, found, vision)
    if len(found) != len(images):
        raise ValueError(
            f"a sequence has {len(found)} image placeholders (token {vision.image}) and {len(images)} images: "
            "give one image for each placeholder"
        )
    runs = [image_tokens(image, vision) for image in images]
    counts_L = torch.ones_like(ids_L)
    counts_L[found] = torch.tensor([len(run) for run in runs], dtype=torch.int64)
    origin_T = torch.arange(len(ids_L)).repeat_interleave(counts_L)
    ids_T, ends_L = ids_L[origin_T], counts_L.cumsum(0)
    spans = [(int(ends_L[at]) - len(run), int(ends_L[at])) for at, run in zip(found, runs, strict=True)]
    for (begin, end), run in zip(spans, runs, strict=True):
        ids_T[begin:end] = torch.tensor(run)
    firsts = [begin + run.index(vision.image) for (begin, _), run in zip(spans, runs, strict=True)]
    return Expanded(ids_T, origin_T, spans, firsts)


def _check_unexpanded(ids_L: torch.Tensor, found: list[int], vision: Vision) -> None:
    if vision.video is not None and bool((ids_L == vision.video).any()):
        raise ValueError(f"a sequence has the placeholder of a video (token {vision.video}): give its frames as images")
    if vision.tile is None:
        # Chat templates write marks around each placeholder, so only expanded ids have two in a row.
        expanded = any(b - a == 1 for a, b in zip(found, found[1:], strict=False))
    else:
        # Two images in a row are two placeholders in a row here, but only expanded ids have marks before them.
        marks = vision.marks
        firsts = [] if marks is None else [[marks.fence, *marks.whole], [marks.fence, *marks.tiles[0][0]]]
        expanded = any(ids_L[max(at - len(f), 0) : at].tolist() == f for at in found for f in firsts)
    if expanded:
        raise ValueError(
            f"image placeholders (token {vision.image}) stand together as in ids that are expanded already: give the "
            "ids of the model's chat template, with one placeholder per image"
        )


def positions(ids_T: torch.Tensor, images: Sequence[Payload], vision: Vision) -> torch.Tensor:
    """Return the position ids of ONE sequence of expanded ids: int64 [3, T], or [T] for families with LINE.

    The result equals that of the model's own `get_rope_index`. An image takes as many positions as the longer side of
    its grid has tokens. Raises ValueError if placeholders and images disagree, as after a cut inside an image.
    """
    found = (ids_T == vision.image).nonzero().flatten()
    wanted = sum(image.tokens for image in images)
    if len(found) != wanted:
        raise ValueError(
            f"a sequence has {len(found)} placeholders of image features, but its {len(images)} images have {wanted} "
            "features: cut sequences before an image, never inside"
        )
    if not vision.mrope:
        return torch.arange(len(ids_T), device=ids_T.device)
    steps_T = torch.ones_like(ids_T)
    corners, inside, at = [], [], 0
    for image in images:
        assert image.grid is not None
        begin, at = int(found[at]), at + image.tokens
        if int(found[at - 1]) != begin + image.tokens - 1:
            raise ValueError(
                f"the {image.tokens} placeholders of an image from token {begin} on have others in between"
            )
        t, h, w = image.grid[0], image.grid[1] // vision.merge, image.grid[2] // vision.merge
        # All tokens of an image count from one corner; the text behind continues after the longer side.
        steps_T[begin : begin + image.tokens] = 0
        steps_T[begin + image.tokens - 1] = max(h, w)
        corners.append(begin)
        inside.append(torch.cartesian_prod(*(torch.arange(n) for n in (t, h, w))).T)
    ends_T = steps_T.cumsum(0)
    positions_3T = (ends_T - steps_T).repeat(3, 1)
    for begin, offsets in zip(corners, inside, strict=True):
        corner = positions_3T[:, begin : begin + 1].clone()
        positions_3T[:, begin : begin + offsets.shape[1]] = corner + offsets.to(ids_T.device)
    return positions_3T
