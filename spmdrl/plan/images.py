"""Assumes which images the prompts of a plan show.

A plan reads no data. Like the lengths of sequences, the images are the largest that the settings allow: each prompt of
a model that reads images consists of them, as far as `--rollout.max-prompt-tokens` allows.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.config.schema import Config
from spmdrl.data.segment import Shown
from spmdrl.hub.images import SETTINGS, load_processor
from spmdrl.hub.vision import Vision, read_vision, tower_sizes
from spmdrl.plan.numbers import META
from spmdrl.policy.vision import part_of
from spmdrl.spmd.payload import Payload

MARKS = 3
"""Number of tokens around an image or a tile: a mark before and behind it, and a name of the tile."""


@dataclass(frozen=True)
class Images:
    """The images of each prompt in a plan. All are equally large."""

    vision: Vision
    count: int
    """Number of images in a prompt, or for the tiled families the number of tiles."""
    tokens: int
    """Number of placeholders of an image."""
    shape: tuple[int, ...]
    """Shape of an image's pixels, float32."""
    grid: tuple[int, int, int] | None = None
    """`Payload.grid` of an image."""
    tower: int = 0
    """Number of parameters of the vision tower."""
    projector: int = 0
    """Number of parameters between tower and language model."""

    @property
    def patches(self) -> int:
        """Number of patches of an image; the tower works on as many."""
        return self.tokens * self.vision.merge**2

    @property
    def bytes(self) -> int:
        """Bytes of a prompt's pixels in host memory."""
        return self.count * 4 * math.prod(self.shape)

    @property
    def flops(self) -> int:
        """FLOPs of a forward pass over a prompt's images, without attention."""
        return 2 * self.count * (self.tower * self.patches + self.projector * self.tokens)

    def lines(self, budget: int, exchanged: int) -> list[str]:
        """Return the report lines about the images.

        budget: maximum number of tokens of a micro-batch. exchanged: bytes of pixels that reach a rank in a step.
        """
        each = self.vision.merge**2
        return [
            f"images   assumed: each prompt shows {self._text()}, {self.bytes / 1e6:,.1f} MB of pixels",
            f"         at most {each} patches for each token of a micro-batch, so {each * budget:,}; in a step "
            f"{exchanged / 1e9:,.2f} GB of pixels at most reach a rank",
        ]

    def facts(self) -> dict[str, int]:
        """Return the numbers of the images in a prompt."""
        names = ("count", "tokens", "patches", "bytes", "tower", "projector", "flops")
        return {name: getattr(self, name) for name in names}

    def _text(self) -> str:
        if self.grid is None:
            side = self.vision.tile
            what = f"{self.count:,} tile{'s' * (self.count != 1)} of {side} x {side} pixels"
        else:
            height, width = (n * self.vision.patch for n in self.grid[1:])
            what = f"{self.count:,} image{'s' * (self.count != 1)} of {width:,} x {height:,} pixels"
        return f"{what}, {self.count * self.tokens:,} tokens from {self.count * self.patches:,} patches"

    def prompt(self, position: int, tokens: list[int]) -> tuple[list[int], Shown]:
        """Put the images of a prompt into its tokens, which stay as many, and return tokens and images.

        position: number of the prompt; other prompts show other images.
        """
        out, shown = list(tokens), []
        for i in range(self.count):
            at = 1 + i * (self.tokens + MARKS)
            out[at : at + self.tokens] = [self.vision.image] * self.tokens
            with _disable_current_modes():
                # A single number in memory; its values are unknown to the plan.
                pixels = torch.empty((), device=META).expand(self.shape)
            tiles = (0, 0) if self.grid is None else None
            shown.append((at, Payload(f"{position:016x}{i:016x}", pixels, self.tokens, self.grid, tiles)))
        assert len(out) == len(tokens), "the images fit into the prompt"
        return out, tuple(shown)


def images_of(cfg: Config, hf_config: Any, folder: Path, numbers: dict[str, int]) -> Images | None:
    """Return the images of each prompt, or None if no image fits into a prompt.

    hf_config: config of a model that reads images. folder: folder of the model's config.json. If it has settings of the
    image processor, images are at most as large as these allow; otherwise a prompt is a single image. numbers: the
    result of `numbers_of`.
    """
    vision, room = read_vision(hf_config), cfg.rollout.max_prompt_tokens - 1
    sizes = numbers["vision"], numbers["projector"]
    if vision.tile is not None:
        count = room // (vision.tile_tokens + MARKS)
        shape = (1, 3, vision.tile, vision.tile)
        return Images(vision, count, vision.tile_tokens, shape, None, *sizes) if count else None
    most = _largest(folder, vision)
    count = max(1, -(-room // (most + MARKS))) if most else 1
    height, width = rectangle(min(room // count - MARKS, most or room))
    if not height:
        return None
    grid = 1, height * vision.merge, width * vision.merge
    shape = (math.prod(grid), 3 * vision.frames * vision.patch**2)
    return Images(vision, count, height * width, shape, grid, *sizes)


def numbers_of(sizes: dict[str, int], vision: Vision | None) -> dict[str, int]:
    """Return the number of parameters of each part of a model: `vision`, `projector` and `language`.

    sizes: sizes of the parameters by HF name. vision: facts of the model, or None if it reads text only.
    """
    parts: dict[str, int] = {"vision": 0, "projector": 0, "language": 0}
    for name, size in sizes.items():
        parts[part_of(name, vision) if vision else "language"] += size
    return parts


def encoder_bytes(hf_config: Any, features: int, ranks: int, width: int) -> int:
    """Estimate the bytes that an engine needs on each rank to compute the features of images.

    The tower's residual, a layer's input and its widest output count per patch, and the features as the engine keeps
    them. features: number of features computed together. ranks: ranks that shard the tower. width: bytes of a number.
    """
    vision, tower = read_vision(hf_config), tower_sizes(hf_config)
    wide = max(3 * tower.inner, 4 * tower.hidden) // ranks
    layers = 1 + len(getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ())
    out = features * layers * hf_config.get_text_config().hidden_size
    return width * (features * vision.merge**2 * (3 * tower.hidden + wide) + out)


def rectangle(tokens: int) -> tuple[int, int]:
    """Return the height and width of an image, in tokens, that has the most of up to `tokens` tokens.

    The longer side of 16 tokens or more is at most three times the shorter. Without tokens, both are 0.
    """
    if tokens < 1:
        return 0, 0
    least, most = math.isqrt(-(-tokens // 2)), math.isqrt(tokens)
    height = max(range(max(least, 1), most + 1), key=lambda h: (h * (tokens // h), h))
    return height, tokens // height


def _largest(folder: Path, vision: Vision) -> int | None:
    """Return the largest number of tokens of an image under the processor's settings, or None if there are none."""
    if not any((folder / name).is_file() for name in SETTINGS):
        return None
    return load_processor(folder, vision).size["longest_edge"] // (vision.patch * vision.merge) ** 2
