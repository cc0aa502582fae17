"""LoRA adapters in a Hugging Face model: their names, how to attach them, and how to run without them."""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdrl.config.schema import LoraConfig
from spmdrl.hub.build import decoder_layers, language_model_class
from spmdrl.hub.folder import read_config
from spmdrl.spmd.seeds import seed_for

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
"""Prefix of all parameter names in PEFT's adapter files."""
FUSED_MIXERS = {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "zamba2"}
"""Model types whose fused state-space kernels read the weight of `out_proj` directly and would ignore its adapter."""


def is_adapter(name: str) -> bool:
    """Return True if this is the name of a weight added by PEFT."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Strip PEFT's additions from a parameter name: return its original name, or an adapter's name in PEFT's files."""
    return name.replace(".base_layer.", ".").replace(".default.weight", ".weight")


def partner(name: str) -> tuple[str, str]:
    """Return the names of the adapter matrices A and B for the layer whose weight is named `name`."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def target_modules(hf: Any, targets: tuple[str, ...]) -> list[str]:
    """Return the names, without paths, of the decoder's linear layers to which adapters are added.

    Only linear layers can have adapters; experts that transformers packs into one parameter cannot. Raises ValueError
    for a target that is not a linear layer, or whose adapter the model's forward pass would ignore.
    """
    ignored = ("out_proj",) if hf.config.model_type in FUSED_MIXERS else ()
    named = [(name.rpartition(".")[2], type(m) is nn.Linear) for name, m in decoder_layers(hf).named_modules()]
    # PEFT selects modules by name alone, so a name is usable only if all modules with that name are linear layers.
    others = {name for name, is_linear in named if not is_linear}
    linear = {name: True for name, is_linear in named if is_linear and name not in others}
    wrong = [name for name in targets if name in ignored]
    if wrong:
        raise ValueError(
            f"--lora.targets {' '.join(wrong)}: the fused kernels of {hf.config.model_type} read this layer's weight "
            "and ignore an adapter; leave it out"
        )
    unknown = [name for name in targets if name != ALL_LINEAR and name not in linear]
    eligible = [name for name in linear if name not in ignored]
    if not eligible:
        raise ValueError(
            f"--lora.targets {' '.join(targets)}: the decoder has no linear layer that can take an adapter (experts "
            "packed into one parameter take no adapter)"
        )
    if unknown:
        raise ValueError(
            f"--lora.targets {' '.join(unknown)}: no linear layer of the decoder has that name; choose from "
            f"{', '.join(eligible)}, or take {ALL_LINEAR} (experts packed into one parameter take no adapter)"
        )
    return sorted(eligible if ALL_LINEAR in targets else set(targets))


def linear_names(folder: Path, trust_remote_code: bool, targets: tuple[str, ...]) -> list[str]:
    """Return `target_modules` of the model in an HF folder, without reading its weights."""
    config = read_config(folder, trust_remote_code)
    with torch.device("meta"):
        hf = language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return target_modules(hf, targets)


def attach(hf: Any, cfg: LoraConfig, seed: int, dtype: torch.dtype, scaled: bool = False):
    """Add adapters of `dtype` to an HF model in place; return the PEFT LoraConfig to save with the adapters.

    Adapters are initialised by `initial_values`, or without values on the meta device if the model is on it.

    Args:
        hf: an HF model whose layers are not sharded.
        cfg: rank, alpha and targets.
        seed: the run's seed.
        dtype: torch dtype of the adapters.
        scaled: True if the values of B that will be loaded already include the factor alpha / r, as those sent to an
            engine do.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    config = PeftConfig(
        r=cfg.rank,
        lora_alpha=cfg.rank if scaled else cfg.alpha,
        target_modules=target_modules(hf, cfg.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    saved_config = config_for_peft(config, hf)
    frozen = {name: p.dtype for name, p in hf.named_parameters()}
    empty = next(hf.parameters()).is_meta
    with torch.random.fork_rng(devices=[]):
        # PEFT is given the layers, not the model: in a model with experts it would mistake names such as `down_proj`
        # for the packed experts of older checkpoints, and adapt those parameters instead of the linear layers.
        inject_adapter_in_model(config, decoder_layers(hf), low_cpu_mem_usage=empty)
    for name, p in hf.named_parameters():
        name = plain_name(name)
        if not is_adapter(name):
            assert p.dtype == frozen[name], f"{name} was cast"
            continue
        p.data = p.data.to(dtype)
        if not empty:
            p.data.copy_(initial_values(name, tuple(p.shape), seed))
    return saved_config


def config_for_peft(config: Any, hf: Any) -> Any:
    """Return a copy of `config` that makes PEFT adapt the same linear layers when it loads the model.

    PEFT mistakes some names, such as `down_proj`, for packed experts. Linear layers with these names are listed
    individually, as parameters.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def means_experts(name: str) -> bool:
        single = copy.deepcopy(config)
        single.target_modules = {name}
        try:
            convert_peft_config_for_transformers(single, model=hf, conversions=None)
        except ValueError:
            return True  # PEFT maps this name and another one to a single packed expert parameter
        return name not in single.target_modules

    ambiguous = {name for name in config.target_modules if means_experts(name)}
    out = copy.deepcopy(config)
    if ambiguous:
        inside = {id(m) for m in decoder_layers(hf).modules()}
        out.target_modules = set(config.target_modules) - ambiguous
        out.target_parameters = [
            f"{name}.weight"
            for name, m in hf.named_modules()
            if id(m) in inside and type(m) is nn.Linear and name.rpartition(".")[2] in ambiguous
        ]
    return out


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the initial values of an unsharded adapter weight, as float64 on the CPU.

    A is seeded by the run's seed and the layer's name, so it is the same for any number of ranks. B is 0, so that the
    adapter does not change the model initially.

    name: weight name as returned by `plain_name`.
    """
    if ".lora_A." not in name:
        return torch.zeros(shape, dtype=torch.float64)
    # As in PEFT, A is uniform in [-1 / sqrt(D), 1 / sqrt(D)] for a layer with D inputs.
    draw = torch.Generator().manual_seed(seed_for(seed, *name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, dtype=torch.float64).uniform_(-bound, bound, generator=draw)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside this context, so that exactly the base model runs."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    # enable_adapters() would change requires_grad, which must not change after the model was sharded.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def are_adapters(names: Iterable[str]) -> bool:
    """Return True if `names` are adapter names, or False if they are names of model weights."""
    kinds = {is_adapter(name) for name in names}
    assert len(kinds) <= 1, "adapters and weights of a model must not be mixed"
    return kinds == {True}
