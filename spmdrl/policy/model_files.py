"""Prepares the non-weight files of a checkpoint at startup, so that errors surface before training."""

from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spmdrl.config.schema import TrainingConfig
from spmdrl.data.template_ends import end_of_turn_tokens, job_template
from spmdrl.hub.ends import GENERATION, generation_config
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import has_tokenizer, load_tokenizer

COPIED = "*processor_config.json"
"""Pattern of files that are copied unchanged, because transformers cannot always write them."""


def fixed_files(source: Path, config: Any, dtype: torch.dtype, cfg: TrainingConfig, head: str) -> dict[str, bytes]:
    """Return file contents by name: a checkpoint's config, its tokenizer, and files copied from `source`.

    The tokenizer gets the chat template that the job uses to render dialogues. The generation config gets the
    end-of-turn tokens of this template, so that any engine stops where the model was trained to stop. A critic or
    reward model without a tokenizer gets the policy's tokenizer.

    config: the transformers config that the model was built from. dtype: dtype of the weights in the checkpoint. head:
    a `contract.Head`; only `lm` models get a generation config.

    Raises:
        ValueError: transformers cannot write the config or the tokenizer.
    """
    trust = cfg.model.trust_remote_code
    config = deepcopy(config)
    config.dtype = dtype
    # transformers keeps the path of the loaded weights in this attribute, which must not be saved.
    vars(config).pop("transformers_weights", None)
    tokenizer = load_tokenizer(source if has_tokenizer(source) else resolve(cfg.model.path, trust), trust)
    template = job_template(cfg, tokenizer)
    if template and (cfg.data.chat_template or not tokenizer.chat_template):
        tokenizer.chat_template = template
    with TemporaryDirectory() as name:
        away = Path(name)
        try:
            # Do not use save_pretrained, which rejects sampling parameters that a config.json may contain.
            config.to_json_file(away / "config.json")
            tokenizer.save_pretrained(away)
        except Exception as error:  # transformers raises exceptions of many types.
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{source}: checkpoints of this model cannot be saved, because transformers cannot write the "
                f"configuration or tokenizer ({type(error).__name__}: {reason}); correct that folder "
                "or use another model"
            ) from error
        files = {p.relative_to(away).as_posix(): p.read_bytes() for p in sorted(away.rglob("*")) if p.is_file()}
    patterns = [COPIED, *(["*.py"] if trust else [])]
    files |= {p.name: p.read_bytes() for pattern in patterns for p in sorted(source.glob(pattern))}
    generation = generation_config(source, end_of_turn_tokens(tokenizer, template)) if head == "lm" else None
    return files | ({GENERATION: generation} if generation is not None else {})
