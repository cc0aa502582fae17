"""Adds tokens to a model's tokenizer and embedding tables, in a new folder that is cached.

A new token's row in an embedding table is initialised to the mean of the other tokens' rows, so that its logit starts
as their mean logit. The new row replaces a padding row of the table or is appended. Weight files without an embedding
table are symlinks to the model's files.
"""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import torch

from spmdrl.hub.cache import made_once
from spmdrl.hub.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "lm_head.weight")
TABLES += ("embed_out.weight", "output_layer.weight")
"""Name suffixes of input and output embedding tables, which have one row per token."""
FORM = 2
"""Version of the rule for new rows; folders are created again when it changes."""
INDEX = "model.safetensors.index.json"


def with_tokens(folder: Path, tokens: tuple[str, ...], trust_remote_code: bool = False) -> Path:
    """Return a folder with the same model, whose tokenizer has each of `tokens` as a special token.

    Returns `folder` itself if its tokenizer already has all of them. Safe to call from several processes at once.
    Raises ValueError if no weight is named like an embedding table (TABLES).
    """
    tokenizer = load_tokenizer(folder, trust_remote_code)
    present = tokenizer.get_added_vocab()
    added = [token for token in dict.fromkeys(tokens) if token not in present]
    if not added:
        return folder
    stat = (folder / "config.json").stat()
    key = json.dumps([FORM, str(folder.resolve()), stat.st_mtime_ns, added])
    name = f"{folder.name}-grown-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return made_once(name, lambda place: _grow(folder, place, tokenizer, added))


def _grow(folder: Path, place: Path, tokenizer, added: list[str]) -> None:
    """Write the tokenizer, config and tables with the new tokens to `place`; copy or link all other files."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    old = sorted(set(tokenizer.get_vocab().values()))
    tokenizer.add_tokens(added, special_tokens=True)
    new = tokenizer.convert_tokens_to_ids(added)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config if "vocab_size" in config else config.get("text_config", {})
    before, size = int(text["vocab_size"]), max(int(text["vocab_size"]), len(tokenizer), *(i + 1 for i in new))
    text["vocab_size"] = size
    log.info("adding %s to %s: the embeddings had %d rows and get %d", ", ".join(added[:4]), folder, before, size)
    tokenizer.save_pretrained(place)
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    grown = 0
    for file in sorted(folder.iterdir()):
        if file.is_dir() or (place / file.name).exists():
            continue
        if file.suffix != ".safetensors":
            if file.name != INDEX:
                shutil.copy(file, place / file.name)
            continue
        with safe_open(file, "pt") as weights:
            tables = [name for name in weights.keys() if name.endswith(TABLES)]  # noqa: SIM118 (not a dict)
        if not tables:
            os.symlink(file.resolve(), place / file.name)
            continue
        found = load_file(file)
        for name in tables:
            found[name] = _with_rows(found[name], before, size, old, new)
            grown += 1
        save_file(found, place / file.name, {"format": "pt"})
    if not grown:
        raise ValueError(f"{folder}: no weight has the name of an embedding table, so tokens cannot be added")
    if (folder / INDEX).is_file():
        shutil.copy(folder / INDEX, place / INDEX)


def _with_rows(table_VD: torch.Tensor, before: int, size: int, old: list[int], new: list[int]) -> torch.Tensor:
    """Return a table with `size` rows, in which the rows of `new` tokens are the mean of the rows of `old` tokens.

    before: number of rows that the model uses in the given table. The remaining rows are padding and are dropped.
    """
    table_VD = table_VD[:before]
    mean_D = table_VD[[i for i in old if i < before]].double().mean(0).to(table_VD.dtype)
    out_VD = torch.cat([table_VD, mean_D.expand(size - before, -1)])
    out_VD[new] = mean_D
    return out_VD.contiguous()
