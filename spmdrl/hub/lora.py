"""Low-rank adapters (LoRA) in a Hugging Face model: their names, where they go, and the model without them."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdrl.config.schema import LoraConfig
from spmdrl.hub.build import decoder_layers
from spmdrl.spmd.seeds import seed_for

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
"""Of every name in PEFT's files."""


def is_adapter(name: str) -> bool:
    """True for the name of a weight that PEFT brought in."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Name of a parameter without what PEFT adds: the layer's own as it was, adapters as in PEFT's files."""
    return name.replace(".base_layer.", ".").replace(".default.weight", ".weight")


def partner(name: str) -> tuple[str, str]:
    """Names of the A and B that belong to the weight of a layer, if it has any."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def target_modules(layers: list[nn.Module], targets: tuple[str, ...]) -> list[str]:
    """Last names of the linear layers to adapt, of those that the decoder layers hold.

    What is not a linear layer of its own, such as experts that transformers packs into one parameter, has no adapter.

    Raises:
        ValueError: a target that is none of them.
    """
    linear = {
        name.rpartition(".")[2]: True for layer in layers for name, m in layer.named_modules() if type(m) is nn.Linear
    }
    unknown = [name for name in targets if name != ALL_LINEAR and name not in linear]
    if unknown or not linear:
        raise ValueError(
            f"--lora.targets {' '.join(unknown or targets)}: no linear layer of the decoder has that name; this model "
            f"has {', '.join(linear) or 'none'} (experts packed into one parameter take no adapter), or {ALL_LINEAR}"
        )
    return sorted(linear) if ALL_LINEAR in targets else sorted(set(targets))


def linear_names(folder: Path, trust_remote_code: bool, targets: tuple[str, ...]) -> list[str]:
    """`target_modules` of the model in a HF folder, whose weights are not read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return target_modules(decoder_layers(hf), targets)


def attach(hf: Any, cfg: LoraConfig, seed: int, dtype: torch.dtype, scaled: bool = False):
    """Put adapters of `dtype` into a whole HF model, in place; returns PEFT's LoraConfig. B starts at 0.

    The numbers in A hang on the run's seed and on the layer's name: the same on every rank, for any number of ranks.

    Args:
        hf: a model whose layers are not sharded.
        cfg: rank, alpha, targets.
        seed: of the run.
        dtype: of the adapters.
        scaled: for B that come multiplied by alpha / r, as they are pushed.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    config = PeftConfig(
        r=cfg.rank,
        lora_alpha=cfg.rank if scaled else cfg.alpha,
        target_modules=target_modules(decoder_layers(hf), cfg.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    frozen = {name: p.dtype for name, p in hf.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, hf)
    for name, p in hf.named_parameters():
        name = plain_name(name)
        if not is_adapter(name):
            assert p.dtype == frozen[name], f"{name} was cast"
            continue
        p.data = p.data.to(dtype)
        if ".lora_A." in name:
            # As PEFT does it: uniform within 1 / sqrt(D).
            draw = torch.Generator().manual_seed(seed_for(seed, *name.encode()))
            bound = 1 / math.sqrt(p.shape[1])
            p.data.copy_(torch.empty(p.shape, dtype=torch.float64).uniform_(-bound, bound, generator=draw))
    return config


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model beneath the adapters, exactly: they are not run."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    # Not enable_adapters(): that flips requires_grad, which a sharded model was built with.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def are_adapters(names: Iterable[str]) -> bool:
    """True for the names of adapters, False for those of a model's weights."""
    kinds = {is_adapter(name) for name in names}
    assert len(kinds) <= 1, "a part is of one kind"
    return kinds == {True}
