"""Builds the model of a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch

from spmdrl.hub.folder import plain_errors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""`--model.dtype` in torch's terms."""


def build_model(
    folder: Path,
    dtype: str | torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    head: str = "lm",
) -> Any:
    """Build the model of a Hugging Face folder, on the CPU, in eval mode (so without dropout).

    dtype: a torch type or its name. attn_implementation: as in transformers. head: `lm` for a causal language model,
    `value` or `score` for a sequence classifier with one label; a `value` head that is not in the folder starts at 0,
    so that a critic can begin as the language model. Raises ValueError when the model needs
    Python code of its own and may not run it, and when weights are missing or of another shape (transformers would
    make them up).
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # transformers' kernels for experts have no float64.
    kernels = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with plain_errors(folder), torch.random.fork_rng(devices=[]):
        loaded: Any = kind.from_pretrained(
            folder,
            **({} if head == "lm" else {"num_labels": 1}),
            **kernels,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    model, report = loaded
    missing = set(report["missing_keys"])
    if head == "value" and "score.weight" in missing:
        torch.nn.init.zeros_(model.score.weight)
        missing.remove("score.weight")
    wrong = [*sorted(missing), *(str(key) for key in report["mismatched_keys"])]
    if wrong:
        names = ", ".join(wrong[:4])
        raise ValueError(f"the weights in {folder} do not fit its config.json: missing or misshapen {names}")
    # torch gives the padding token's embedding no gradient. A pack has no padding: in it that token, which may also be
    # the end token, is an ordinary one.
    model.get_input_embeddings().padding_idx = None
    return model


def decoder_layers(hf: Any) -> list[torch.nn.Module]:
    """Return the repeated blocks of a HF model: its longest ModuleList.

    Raises:
        ValueError: a model without one.
    """
    from torch import nn

    lists = [m for m in hf.base_model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(hf).__name__} has no list of layers to shard; --policy.backend fsdp needs one")
    return list(max(lists, key=len))
