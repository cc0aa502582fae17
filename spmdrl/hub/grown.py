"""A model's folder with tokens added to its tokenizer, made once and kept in the cache.

The row of a new token in a table of embeddings is the mean of the tokenizer's other ones, so that it is neither
likelier nor unlikelier than others at the start. It may be one that pads the table already, or the table gets longer.
All other files of weights are links to those of the model.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

from spmdrl.hub.gguf import cache, lock
from spmdrl.hub.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "lm_head.weight")
TABLES += ("embed_out.weight", "output_layer.weight")
"""Endings of the names of tables with a row for each token."""
FORM = 2
"""Number of the rule by which rows are made: folders of another one are not taken."""
INDEX = "model.safetensors.index.json"


def with_tokens(folder: Path, tokens: tuple[str, ...], trust_remote_code: bool = False) -> Path:
    """Return the folder of a model whose tokenizer holds `tokens`, each as one special token.

    The model's own folder where it holds them all. May be called by several processes at once.

    Raises:
        ValueError: a table of embeddings cannot be told from its name.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code)
    held = tokenizer.get_added_vocab()
    fresh = [token for token in dict.fromkeys(tokens) if token not in held]
    if not fresh:
        return folder
    stat = (folder / "config.json").stat()
    key = json.dumps([FORM, str(folder.resolve()), stat.st_mtime_ns, fresh])
    place = cache() / "models" / f"{folder.name}-grown-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if place.is_dir():
        return place
    with lock(place.with_name(place.name + ".lock")):
        if not place.is_dir():
            temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
            try:
                _grow(folder, temporary, tokenizer, fresh)
                temporary.chmod(0o755)
                os.rename(temporary, place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return place


def _grow(folder: Path, place: Path, tokenizer, fresh: list[str]) -> None:
    """Write tokenizer, configuration and tables into `place`, and links to everything else."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    old = sorted(set(tokenizer.get_vocab().values()))
    tokenizer.add_tokens(fresh, special_tokens=True)
    new = tokenizer.convert_tokens_to_ids(fresh)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config if "vocab_size" in config else config.get("text_config", {})
    before, size = int(text["vocab_size"]), max(int(text["vocab_size"]), len(tokenizer), *(i + 1 for i in new))
    text["vocab_size"] = size
    log.info("adding %d tokens to %s: %d rows of embeddings become %d", len(fresh), folder, before, size)
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
        raise ValueError(f"{folder}: no table of embeddings is found among its weights, so that none can get new rows")
    if (folder / INDEX).is_file():
        shutil.copy(folder / INDEX, place / INDEX)


def _with_rows(table_VD: torch.Tensor, before: int, size: int, old: list[int], new: list[int]) -> torch.Tensor:
    """Return a table of `size` rows in which those of `new` tokens are the mean of those of `old` ones.

    before: rows of the table that the model reads.
    """
    table_VD = table_VD[:before]
    mean_D = table_VD[[i for i in old if i < before]].double().mean(0).to(table_VD.dtype)
    out_VD = torch.cat([table_VD, mean_D.expand(size - before, -1)])
    out_VD[new] = mean_D
    return out_VD.contiguous()
