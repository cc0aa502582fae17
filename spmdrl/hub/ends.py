"""The end tokens listed in a model folder, and a generation config that adds more."""

import json
from pathlib import Path
from typing import Any

from spmdrl.hub.folder import plain_errors

GENERATION = "generation_config.json"


def named_ends(folder: Path) -> list[int]:
    """Return the end token ids in a folder's generation config, or in its config.json if there are none.

    Raises ValueError for an end token that is not an integer.
    """
    from transformers import GenerationConfig

    file, eos = GENERATION, None
    if (folder / file).exists():
        with plain_errors(folder):
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
    if eos is None:
        file = "config.json"
        with plain_errors(folder):
            config = json.loads((folder / file).read_text(encoding="utf-8"))
            eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    if not all(i is None or (isinstance(i, int) and not isinstance(i, bool)) for i in ids):
        raise ValueError(f"{folder}: its {file} names {ids} as end tokens: write their ids, which are integers")
    return [i for i in ids if i is not None]


def generation_config(folder: Path, ends: tuple[int, ...]) -> bytes | None:
    """Return the bytes of a generation config with the folder's end tokens and `ends`, or None if none is needed.

    The folder's own file is returned unchanged if it already lists all of `ends`. transformers stops only at the end
    tokens in the generation config, not at the tokenizer's end token.
    """
    file = folder / GENERATION
    named = named_ends(folder)
    if set(ends) <= set(named):
        return file.read_bytes() if file.exists() else None
    if file.exists():
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        content = {key: text[key] for key in ("bos_token_id", "pad_token_id") if text.get(key) is not None}
    content["eos_token_id"] = [*named, *(end for end in ends if end not in named)]
    return (json.dumps(content, indent=2) + "\n").encode()
