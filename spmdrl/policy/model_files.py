"""Makes the files beside the weights in a checkpoint's model folder at start, so that no checkpoint fails on them."""

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
"""Files of a language model that are copied byte for byte: transformers may refuse to write files that it can read."""


def fixed_files(source: Path, config: Any, dtype: torch.dtype, cfg: TrainingConfig, head: str) -> dict[str, bytes]:
    """Return name -> content of the configuration, the tokenizer and the files copied from the model's folder.

    The tokenizer gets the chat template by which the job renders dialogues, and the generation config gets the tokens
    that end a turn in it, so that any engine stops where the model was trained to stop. A critic or reward model
    without a tokenizer of its own reads the policy's tokens and gets the policy's tokenizer.

    config: of transformers, as the model was built. dtype: of the weights in the checkpoint. head: as in the contract;
    only an `lm` model generates text.

    Raises:
        ValueError: a part that transformers cannot write.
    """
    trust = cfg.model.trust_remote_code
    config = deepcopy(config)
    config.dtype = dtype
    # transformers stores the path of the weights there.
    vars(config).pop("transformers_weights", None)
    tokenizer = load_tokenizer(source if has_tokenizer(source) else resolve(cfg.model.path, trust), trust)
    template = job_template(cfg, tokenizer)
    if template and (cfg.data.chat_template or not tokenizer.chat_template):
        tokenizer.chat_template = template
    with TemporaryDirectory() as name:
        away = Path(name)
        try:
            # save_pretrained refuses sampling parameters, which a config.json may have.
            config.to_json_file(away / "config.json")
            tokenizer.save_pretrained(away)
        except Exception as error:  # transformers refuses in many ways, with exceptions of many types
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{source}: no checkpoint of this model could be saved, as transformers cannot write its configuration "
                f"or tokenizer ({type(error).__name__}: {reason}); mend the files of that folder or take another model"
            ) from error
        files = {p.relative_to(away).as_posix(): p.read_bytes() for p in sorted(away.rglob("*")) if p.is_file()}
    patterns = [*([COPIED] if head == "lm" else []), *(["*.py"] if trust else [])]
    files |= {p.name: p.read_bytes() for pattern in patterns for p in sorted(source.glob(pattern))}
    generation = generation_config(source, end_of_turn_tokens(tokenizer, template)) if head == "lm" else None
    return files | ({GENERATION: generation} if generation is not None else {})
