"""Checks a Hugging Face folder on disk before anything is built from it.

The only supported quantised checkpoints are fp8 with per-block scales.
"""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"


def check_folder(folder: Path, trust_remote_code: bool = False) -> Path:
    """Return `folder` if it has a readable config.json and complete safetensors files, or raise ValueError."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json (--model.path)")
    read_config(folder, trust_remote_code)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} lists no weights ({type(error).__name__}: {error}): copy it again") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            names = ", ".join(missing[:4])
            raise ValueError(f"model folder {folder} lacks {len(missing)} of {len(files)} shards: {names}")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
        why = (
            f"only pickled weights ({pickled[0]}), which are refused because loading them runs code: if you trust "
            "them, convert them to safetensors with from_pretrained(...).save_pretrained(...)"
            if pickled
            else "no weights: model.safetensors is missing"
        )
        raise ValueError(f"model folder {folder} has {why} (--model.path)")
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # raises if the file size does not match its header
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error}): copy it again") from error
    return folder


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the transformers config of a model folder. Raises ValueError if it cannot be read."""
    from transformers import AutoConfig

    with plain_errors(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """Convert library errors about files in a model folder into a one-line ValueError that names a flag.

    transformers, tokenizers and safetensors raise many types of exceptions for bad files, even a bare KeyError.
    Out-of-memory errors and spmdrl's own ValueErrors are not converted.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the model in {folder} brings its own Python code, which would run on this machine: read it, then set "
                "--model.trust-remote-code if you trust it"
            ) from None
        from spmdrl.health.causes import out_of_memory

        raised = traceback.extract_tb(error.__traceback__)[-1].filename
        if out_of_memory(error) or (isinstance(error, ValueError) and Path(raised).is_relative_to(TINY.parents[1])):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"cannot read the model in {folder} (--model.path): {reason}") from error


def fp8_blocks(folder: Path) -> tuple[int, int] | None:
    """Return the block size (rows, columns) of a folder's fp8 weights, or None if it is not quantised.

    Raises ValueError for any other quantisation method.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return blocks_of(found, folder) if found else None


def blocks_of(settings: Any, folder: Path) -> tuple[int, int]:
    """Return the block size in a `quantization_config` (dict or transformers object). Errors as in `fp8_blocks`."""
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
            f"{folder}: fp8 with weight_block_size {blocks} is not supported, because fp8 is read only with a scale "
            "for each block, such as [128, 128]; take a dequantised folder (--model.path)"
        )
    return blocks[0], blocks[1]


def drop_quantization(config: Any, folder: Path) -> Any:
    """Remove the quantisation from a model's transformers config in place, and return the config.

    Weights are dequantised as they are read, so neither the model nor its checkpoints are quantised. Raises ValueError
    for any method other than fp8 with per-block scales.
    """
    for each in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(each, "quantization_config", None):
            blocks_of(each.quantization_config, folder)
        vars(each).pop("quantization_config", None)
    return config
