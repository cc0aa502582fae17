"""Builds a rank's shard of the HF engine's model without weights: tensor parallelism, 8-bit layers and LoRA.

Layers are sharded by transformers' tensor-parallel plan for the architecture (https://arxiv.org/abs/1909.08053):
`colwise` layers keep a slice of their outputs; `rowwise` layers keep a slice of their inputs and all-reduce the result.
Modules that the plan does not name (embeddings, norms, the head) or marks as replicated (query and key norms) are
replicated on every rank.

8-bit linear layers have one scale per output channel and round weights to nearest. Only weights are quantized, to int8
(https://arxiv.org/abs/2208.07339, without its outlier handling) or E4M3 (https://arxiv.org/abs/2209.05433). Quantized
engine weights differ from the trainer's, so train with a rollout correction (`--correction.kind`).

The vision tower of a model that reads images is neither sharded nor quantized.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spmdrl.config.engines import pushed_parts
from spmdrl.config.schema import Config
from spmdrl.hub.build import DTYPES, empty_model, give_memory, sees_images
from spmdrl.hub.folder import read_config
from spmdrl.hub.lora import attach
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import read_vision
from spmdrl.spmd.world import World
from spmdrl.weights.reshard import Box
from spmdrl_kernels.host import use_host_linear

FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Format -> torch dtype, and the largest magnitude of a quantized weight."""


def start(
    cfg: Config, world: World
) -> tuple[Any, dist.ProcessGroup | None, dict[str, Box], "dict[str, QuantizedLinear]"]:
    """Build this rank's shard of the model from config.json alone, and allocate its memory on the rank's device.

    Returns:
        The model, with uninitialized weights. Only buffers that checkpoints do not contain have values.
        The tensor-parallel group, or None if layers are not sharded.
        This rank's box (its index range in every dimension) for each sharded parameter.
        The 8-bit layers, keyed by parameter name.
    """
    trust, dtype = cfg.model.trust_remote_code, DTYPES[cfg.model.dtype]
    folder = resolve(cfg.model.path, trust)
    config = read_config(folder, trust).get_text_config()
    # torch's fused attention does not support logit soft-capping (Gemma 2), and transformers would silently skip the
    # cap. None selects fused attention for models that support it.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = empty_model(folder, dtype, trust, attention)
    if "adapter" in pushed_parts(cfg):
        attach(model, cfg.lora, cfg.run.seed, dtype, scaled=True)
    model.requires_grad_(False)
    group = world.rollout_mesh.get_group("tp") if cfg.rollout.tp > 1 else None
    boxes = divide(model, world.engine_tp_rank, group) if group else {}
    quantized = quantize(model, cfg.rollout.quantization) if cfg.rollout.quantization != "none" else {}
    use_host_linear(model)
    # Memory is allocated after sharding, so that a rank never allocates more than its own shard.
    give_memory(model, world.device)
    return model, group, boxes, quantized


def language_of(model: Any) -> tuple[str, Any]:
    """Return the language model in an HF model, without its head, and the prefix of its parameters' names."""
    if sees_images(model.config):
        vision = read_vision(model.config)
        return f"{vision.language}.", model.get_submodule(vision.language)
    return f"{model.base_model_prefix}.", model.base_model


def plan_of(config: Any, ranks: int) -> dict[str, str]:
    """Return the sharding plan: the name of each linear layer to shard -> `colwise` or `rowwise`.

    A `*` in a name stands for a layer number.

    config: the transformers config of a language model. ranks: `--rollout.tp`, for the error message.

    Raises:
        ValueError: the plan shards modules other than linear layers (experts, fused projections), or there is no plan.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    # transformers' replicated styles differ only in how they handle gradients, which an engine does not compute.
    plan = {n: s for n, s in plan.items() if n.startswith("layers.") and not s.startswith("replicated")}
    strange = sorted({style for style in plan.values() if style not in ("colwise", "rowwise")})
    if strange or not plan:
        name = (getattr(config, "architectures", None) or [config.model_type])[0]
        why = f"its tensor-parallel plan has {', '.join(strange)}" if strange else "it has no tensor-parallel plan"
        raise ValueError(
            f"--rollout.tp {ranks}: the hf engine cannot divide {name} ({why}); "
            "take --rollout.engine vllm, or --rollout.tp 1"
        )
    return plan


def divide(model: Any, rank: int, group: dist.ProcessGroup) -> dict[str, Box]:
    """Shard a model's layers for this rank, and return the index range (`Box`) of each sharded parameter.

    Raises:
        ValueError: the model cannot be sharded (`plan_of`).
    """
    ranks, boxes = dist.get_world_size(group), {}
    plan = plan_of(model.config, ranks)
    prefix, language = language_of(model)
    for name, module in language.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))
        if style is None:
            continue
        assert isinstance(module, nn.Linear), name
        dim = 0 if style == "colwise" else 1
        boxes[f"{prefix}{name}.weight"] = _keep(module, "weight", dim, rank, ranks)
        if style == "colwise" and module.bias is not None:
            boxes[f"{prefix}{name}.bias"] = _keep(module, "bias", 0, rank, ranks)
        if style == "rowwise":
            module.register_forward_hook(_summed(group))
    return boxes


def _keep(module: nn.Linear, name: str, dim: int, rank: int, ranks: int) -> Box:
    whole = getattr(module, name).detach()
    size = whole.shape[dim] // ranks
    assert size * ranks == whole.shape[dim], f"{name} {tuple(whole.shape)} over {ranks} ranks"
    part = whole.narrow(dim, rank * size, size).contiguous().clone()
    setattr(module, name, nn.Parameter(part, requires_grad=False))
    return tuple((rank * size, (rank + 1) * size) if d == dim else (0, n) for d, n in enumerate(whole.shape))


def _summed(group: dist.ProcessGroup):
    def hook(module: nn.Linear, _, output: torch.Tensor) -> torch.Tensor:
        if module.bias is not None:
            # Every rank has added the bias, but the sum must contain it only once.
            output = output - module.bias
        dist.all_reduce(output, group=group)
        return output if module.bias is None else output + module.bias

    return hook


class QuantizedLinear(nn.Module):
    """Computes y = (x Q^T) s + b with 8-bit Q [out, in] and float32 s [out]."""

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, kind: str):
        """Quantize a layer's weights, unless they are on the meta device. kind: `int8` or `fp8`."""
        super().__init__()
        self.kind = kind
        dtype = FORMATS[kind][0]
        weight = linear.weight
        # The 8-bit weight is a parameter, so that it is moved and counted with the other parameters.
        self.weight = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=weight.device), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(len(weight), 1, device=weight.device), requires_grad=False)
        self.bias = linear.bias
        if not weight.is_meta:
            self.take(weight.detach())

    @torch.no_grad()
    def take(self, weight: torch.Tensor) -> None:
        """Replace the weights with the quantized `weight`, [out, in] in any floating-point dtype."""
        dtype, most = FORMATS[self.kind]
        weight = weight.float()
        self.scale.copy_((weight.abs().amax(1, keepdim=True) / most).clamp_min(1e-12))
        scaled = weight / self.scale
        self.weight.copy_((scaled.round() if dtype == torch.int8 else scaled).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale[:, 0].to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantize(model: Any, kind: str) -> dict[str, QuantizedLinear]:
    """Quantize the linear layers of an HF language model, except its head, and return them keyed by parameter name."""
    out, (prefix, language) = {}, language_of(model)
    for name, module in list(language.named_modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                quantized = QuantizedLinear(linear, kind)
                setattr(module, child, quantized)
                out[f"{prefix}{name + '.' if name else ''}{child}.weight"] = quantized
    return out
