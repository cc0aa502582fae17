"""Facts of the model families that read images: ids of their tokens, forms of positions, names of their parts."""

from dataclasses import dataclass
from typing import Any

GRID, FRAMES, LINE = "grid", "frames", "line"
"""Forms of position ids. GRID: [3, T] for time, row and column of a token, where a video is one run of tokens. FRAMES:
[3, T] as for GRID, but timestamps split a video into one run of tokens per frame. LINE: [T], as for text. An image has
the same positions under GRID and FRAMES."""

QWEN = {"qwen2_vl": GRID, "qwen2_5_vl": GRID, "qwen3_vl": FRAMES, "qwen3_5": FRAMES}
TILED = ("idefics3", "smolvlm")
MOST_TILES = 6
"""Largest number of rows or columns of tiles for which the tiled families have names."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """Ids that a tiled family writes around the placeholders of an image's tiles."""

    fence: int
    """Stands before each tile and behind the last one."""
    whole: Ids
    """Names the last tile, which shows the whole image."""
    tiles: tuple[tuple[Ids, ...], ...]
    """Names the tile of a row and a column, counted from 0."""
    row_end: Ids
    """Stands behind each row of tiles except the last."""
    last_row_end: Ids
    """Stands between the last row of tiles and the tile with the whole image."""


@dataclass(frozen=True)
class Vision:
    """Facts of one model that reads images, from its config (and tokenizer). Sizes are in pixels."""

    model_type: str
    image: int
    """Placeholder id of an image. Each image has one placeholder in unexpanded ids, and one per image feature in
    expanded ids."""
    video: int | None
    """Placeholder id of a video, or None if the family has none."""
    start: int | None
    """Id before the placeholder, written by the chat template; None for the tiled families (`marks`)."""
    end: int | None
    """Id behind the placeholder, written by the chat template; None for the tiled families."""
    positions: str
    """GRID, FRAMES or LINE."""
    tower: str
    """Name of the vision tower in the model of AutoModelForImageTextToText."""
    projector: tuple[str, ...]
    """Names of the modules that map image features to embeddings. Those of the Qwen families stand inside the tower."""
    language: str
    """Name of the language model, without its head, which is `lm_head`."""
    patch: int
    """Side of a patch."""
    merge: int
    """Number of patches along each side that become one token."""
    frames: int = 1
    """Number of frames in a patch; an image is repeated this often."""
    deepstack: bool = False
    """True if features of earlier layers of the tower are added in the first layers of the language model."""
    tile: int | None = None
    """Side of a tile; None if images are not cut into tiles."""
    marks: Marks | None = None
    """Marks of the tiles; None if images are not cut into tiles, or if the facts were read without a tokenizer."""

    @property
    def mrope(self) -> bool:
        """True if position ids are [3, T]."""
        return self.positions != LINE

    @property
    def never(self) -> Ids:
        """Ids of the placeholders, which engines never sample: the model reads features instead of their embeddings."""
        return (self.image,) if self.video is None else (self.image, self.video)

    @property
    def tile_tokens(self) -> int:
        """Number of placeholders of one tile."""
        assert self.tile is not None
        return (self.tile // self.patch) ** 2 // self.merge**2


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a vision tower's layers."""

    heads: int
    hidden: int
    """Width of the hidden states."""
    inner: int
    """Width of the MLPs."""


def tower_sizes(hf_config: Any) -> TowerSizes:
    """Return the sizes of the vision tower of a model with this config."""
    tower = hf_config.vision_config
    # Qwen2-VL has names of its own, and gives the width of its MLPs as a multiple of the tower's width.
    hidden = getattr(tower, "embed_dim", None) or tower.hidden_size
    heads = getattr(tower, "num_heads", None) or tower.num_attention_heads
    return TowerSizes(heads, hidden, getattr(tower, "intermediate_size", None) or int(tower.mlp_ratio * hidden))


def reads_images(hf_config: Any) -> bool:
    """Return True if a model with this config has a vision tower, whether or not spmdrl supports its family."""
    return getattr(hf_config, "vision_config", None) is not None


def read_vision(hf_config: Any, tokenizer: Any = None) -> Vision:
    """Read the facts of a model from its config.

    The tiled families name their marks only in the tokenizer; without one, `marks` is None and nothing can be expanded.
    Raises ValueError for a model without a vision tower, an unsupported family, and a tokenizer whose image token
    differs from the config's.
    """
    family = getattr(hf_config, "model_type", "")
    supported = ", ".join([*QWEN, *TILED])
    if not reads_images(hf_config):
        raise ValueError(f"the model {family} reads text only: for images use a model of one of {supported}")
    if family in QWEN:
        return _qwen(hf_config)
    if family in TILED:
        return _tiled(hf_config, tokenizer)
    raise ValueError(f"images for models of type {family} are not supported: use a model of one of {supported}")


def part_of(name: str, vision: Vision) -> str:
    """Return the part that a parameter belongs to: `vision`, `projector` or `language`. name: its HF name."""
    # The projectors of some families are inside the tower.
    if name.startswith(tuple(f"{module}." for module in vision.projector)):
        return "projector"
    return "vision" if name.startswith(f"{vision.tower}.") else "language"


def _qwen(config: Any) -> Vision:
    tower = config.vision_config
    deepstack = bool(getattr(tower, "deepstack_visual_indexes", None))
    return Vision(
        model_type=config.model_type,
        image=config.image_token_id,
        video=config.video_token_id,
        start=config.vision_start_token_id,
        end=config.vision_end_token_id,
        positions=QWEN[config.model_type],
        tower="model.visual",
        projector=("model.visual.merger",) + ("model.visual.deepstack_merger_list",) * deepstack,
        language="model.language_model",
        patch=tower.patch_size,
        merge=tower.spatial_merge_size,
        frames=tower.temporal_patch_size,
        deepstack=deepstack,
    )


def _tiled(config: Any, tokenizer: Any) -> Vision:
    return Vision(
        model_type=config.model_type,
        image=config.image_token_id,
        video=None,
        start=None,
        end=None,
        positions=LINE,
        tower="model.vision_model",
        projector=("model.connector",),
        language="model.text_model",
        patch=config.vision_config.patch_size,
        merge=config.scale_factor,
        tile=config.vision_config.image_size,
        marks=None if tokenizer is None else _marks(tokenizer, config.image_token_id),
    )


def _marks(tokenizer: Any, image: int) -> Marks:
    """Read the marks of image tiles from a tokenizer.

    Each mark stands between two special tokens, so the surrounding text never changes the mark's ids.
    """
    placeholder = getattr(tokenizer, "image_token", None) or "<image>"
    fence = getattr(tokenizer, "fake_image_token", None) or "<fake_token_around_image>"
    whole = getattr(tokenizer, "global_image_token", None) or "<global-img>"
    found = tokenizer.convert_tokens_to_ids(placeholder)
    if found != image:
        raise ValueError(
            f"the tokenizer's {placeholder} is token {found}, but image_token_id in config.json is {image}: "
            "use the tokenizer of this model"
        )

    def between(left: str, text: str, right: str) -> Ids:
        ids = tokenizer(left + text + right, add_special_tokens=False)["input_ids"]
        ends = [tokenizer.convert_tokens_to_ids(left), tokenizer.convert_tokens_to_ids(right)]
        if len(ids) < 3 or [ids[0], ids[-1]] != ends:
            raise ValueError(f"the tokenizer splits {left} or {right}: use the tokenizer of this model, which has both")
        return tuple(ids[1:-1])

    sides = range(1, MOST_TILES + 1)
    return Marks(
        fence=tokenizer.convert_tokens_to_ids(fence),
        whole=between(fence, whole, placeholder),
        tiles=tuple(tuple(between(fence, f"<row_{r}_col_{c}>", placeholder) for c in sides) for r in sides),
        row_end=between(placeholder, "\n", fence),
        last_row_end=between(placeholder, "\n\n", fence),
    )
