"""Builds models on paper from their config.json: nothing is read from files of weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from spmdrl.plan.paper import META


@contextmanager
def without_files(folder: Path) -> Iterator[None]:
    """Inside this context policies are built from that folder's config.json, on the meta device."""
    from spmdrl.policy import models
    from spmdrl.policy.fsdp import policy as fsdp

    places: list[tuple[Any, str, Any]] = [
        (fsdp, "resolve", lambda *args: folder),
        (fsdp, "build_model", empty_model),
        (fsdp, "prediction_heads", lambda *args: []),
        (models, "check_same_tokens", lambda *args: None),
    ]
    from importlib.util import find_spec

    if find_spec("megatron") is not None:
        from spmdrl.policy.megatron import convert
        from spmdrl.policy.megatron import policy as megatron

        places += [
            (megatron, "resolve", lambda *args: folder),
            (megatron, "build", on_meta(megatron.build)),
            (megatron, "prediction_heads", lambda *args: []),
            (megatron, "stored", lambda *args: []),
            (convert, "load", lambda *args: None),
        ]
    with ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(patch.object(module, name, value))
        yield


def on_meta(build: Any) -> Any:
    """Wrap Megatron's builder so that parameters are made on the meta device."""

    def built(*args, **kwargs):
        with META:
            return build(*args, **kwargs)

    return built


def empty_model(folder, dtype, trust_remote_code=False, attn_implementation="sdpa", head="lm"):
    """Stand in for `hub.build.build_model`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if head != "lm":
        config.num_labels = 1
    with META:
        model = kind.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.get_input_embeddings().padding_idx = None
    return model.eval()


torch  # noqa: B018
