"""Turns images into the tensors that a model reads, once per image, and puts them together for a forward."""

import hashlib
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmdrl.hub.folder import plain_errors
from spmdrl.hub.vision import MOST_TILES, QWEN, Vision
from spmdrl.spmd.payload import Payload

if TYPE_CHECKING:
    from PIL.Image import Image

MODULES = dict.fromkeys(QWEN, "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil") | {
    "idefics3": "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
    "smolvlm": "smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
}
"""Image processors of the families in `transformers.models`. Those with the PIL backend need no torchvision."""

SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""Files that may hold the settings of a model's image processor; one is enough."""


def load_processor(source: Path | dict[str, Any], vision: Vision) -> Any:
    """Load the image processor of a model from its folder, or from the settings of its preprocessor_config.json.

    The class follows from the family and has the PIL backend; no code in the folder is run. Raises ValueError if the
    files cannot be read, or if their sizes differ from those in the model's config.
    """
    module, _, name = MODULES[vision.model_type].partition(":")
    kind = getattr(import_module(f"transformers.models.{module}"), name)
    if isinstance(source, dict):
        processor = kind.from_dict(source)
    else:
        if not any((source / file).is_file() for file in SETTINGS):
            raise ValueError(f"no preprocessor_config.json in {source} (--model.path): copy the model's into it")
        with plain_errors(source):
            processor = kind.from_pretrained(source, local_files_only=True)
    _check_sizes(processor, vision)
    return processor


def _check_sizes(processor: Any, vision: Vision) -> None:
    """Check that the processor cuts images as the model reads them; raises ValueError otherwise."""
    if vision.tile is None:
        wanted = {"patch_size": vision.patch, "merge_size": vision.merge, "temporal_patch_size": vision.frames}
        found = {name: getattr(processor, name) for name in wanted}
    else:
        wanted = {"max_image_size": {"longest_edge": vision.tile}}
        found = {"max_image_size": {"longest_edge": processor.max_image_size["longest_edge"]}}
    if found != wanted:
        raise ValueError(
            f"the image processor has {found}, but the model's config.json needs {wanted}: "
            "use the preprocessor_config.json of this model"
        )


def most_tokens(processor: Any, vision: Vision) -> int:
    """Return an upper bound of the number of features of an image of any size."""
    if vision.tile is None:
        # Images with sides of 1 to 200, the most that transformers takes, may exceed the limit of pixels.
        return max(processor.size["longest_edge"] // (vision.patch * vision.merge) ** 2, 200)
    if not processor.do_image_splitting:
        return vision.tile_tokens
    side = min(-(-processor.size["longest_edge"] // vision.tile), MOST_TILES)
    return (side**2 + 1) * vision.tile_tokens


def process_image(processor: Any, image: "Image", vision: Vision) -> Payload:
    """Process one image; any mode is converted to RGB, which drops an alpha channel, as transformers does.

    Raises ValueError for an image without pixels, and whatever else the processor refuses, such as sides of 1 to 200.
    """
    if not image.width or not image.height:
        raise ValueError(f"an image of {image.width} x {image.height} pixels: leave it out or give a larger one")
    picture = image if image.mode == "RGB" else image.convert("RGB")
    if vision.tile is None:
        made = processor(images=[picture], return_tensors="pt")
        pixels, grid, tiles = made["pixel_values"].float(), tuple(made["image_grid_thw"][0].tolist()), None
        tokens = grid[0] * grid[1] * grid[2] // vision.merge**2
    else:
        made = processor(images=[[picture]], return_row_col_info=True, return_tensors="pt")
        pixels, grid, tiles = made["pixel_values"][0].float(), None, (made["rows"][0][0], made["cols"][0][0])
        tokens = len(pixels) * vision.tile_tokens
        _check_tiles(pixels, made.get("pixel_attention_mask"), vision)
    return Payload(_name(pixels, grid or tiles, processor), pixels.contiguous(), tokens, grid, tiles)


def _check_tiles(pixels: torch.Tensor, mask: torch.Tensor | None, vision: Vision) -> None:
    assert pixels.shape[1:] == (3, vision.tile, vision.tile), (pixels.shape, vision.tile)
    assert mask is None or bool(mask.all()), "tiles are full squares"
    # transformers takes such a tile for padding and drops its features, so the placeholders of others would get them.
    if not pixels.flatten(1).any(1).all():
        raise ValueError(
            "a tile of the image has only zeros after normalisation, which transformers takes for padding: "
            "change image_mean in preprocessor_config.json, or leave the image out"
        )


def _name(pixels: torch.Tensor, layout: Any, processor: Any) -> str:
    state = hashlib.blake2b(digest_size=16)
    settings = {"shape": list(pixels.shape), "layout": layout, "processor": processor.to_dict()}
    state.update(json.dumps(settings, sort_keys=True, default=str).encode())
    state.update(pixels.numpy().tobytes())
    return state.hexdigest()


def plain_image(vision: Vision, rows: int = 1, columns: int = 1, name: str = "") -> Payload:
    """Return an image of plain colour with `rows` x `columns` features, or for the tiled families as many tiles."""
    if vision.tile is None:
        grid = 1, rows * vision.merge, columns * vision.merge
        shape = grid[1] * grid[2], 3 * vision.frames * vision.patch**2
        return Payload(name, torch.ones(shape), rows * columns, grid)
    # transformers takes a tile of zeros for padding.
    pixels = torch.ones(rows * columns, 3, vision.tile, vision.tile)
    return Payload(name, pixels, rows * columns * vision.tile_tokens, tiles=(0, 0))


def forward_inputs(payloads: Sequence[Payload], vision: Vision) -> dict[str, torch.Tensor]:
    """Return the arguments with pixels for one packed forward, on the CPU; empty without images.

    `payloads` are in the order of their placeholders in the packed row. For GRID and FRAMES: `pixel_values` [patches,
    values of a patch] and `image_grid_thw` int64 [images, 3]; for LINE: `pixel_values` [1, tiles, 3, side, side] and
    `pixel_attention_mask` int64 [1, tiles, side, side]. All tiles have one size, so none are padded.
    """
    if not payloads:
        return {}
    pixels = torch.cat([payload.pixels for payload in payloads])
    if vision.tile is None:
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([payload.grid for payload in payloads])}
    mask = torch.ones(1, len(pixels), vision.tile, vision.tile, dtype=torch.int64)
    return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
