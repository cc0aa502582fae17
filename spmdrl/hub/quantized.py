"""Quantised checkpoints: fp8 with a scale for each block is read, every other form is refused."""

import json
from pathlib import Path
from typing import Any


def fp8_blocks(folder: Path) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of a folder's fp8 weights; None for a folder that is not quantised.

    Raises:
        ValueError: another method of quantisation.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return blocks_of(found, folder) if found else None


def blocks_of(settings: Any, folder: Path) -> tuple[int, int]:
    """Return the blocks that a `quantization_config` describes (a dict, or transformers' object); errors as above."""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method, blocks = str(settings.get("quant_method")), settings.get("weight_block_size")
    if method != "fp8":
        raise ValueError(
            f"{folder} is quantised by {method}: models are read in plain floating point, or in fp8 with a scale for "
            "each block (quant_method fp8, weight_block_size); take a dequantised folder (--model.path)"
        )
    if not (
        isinstance(blocks, list | tuple) and len(blocks) == 2 and all(isinstance(n, int) and n > 0 for n in blocks)
    ):
        raise ValueError(
            f"{folder}: fp8 with weight_block_size {blocks} is not supported, only with a scale for each block, "
            "such as [128, 128]; take a dequantised folder (--model.path)"
        )
    return blocks[0], blocks[1]


def drop_quantization(config: Any, folder: Path) -> Any:
    """Remove the quantisation from transformers' config of a model, in place; returns the config.

    Weights are dequantised as they are read, so neither the model nor its checkpoints are quantised.

    Raises:
        ValueError: weights quantised by this method cannot be read.
    """
    for each in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(each, "quantization_config", None):
            blocks_of(each.quantization_config, folder)
        vars(each).pop("quantization_config", None)
    return config
