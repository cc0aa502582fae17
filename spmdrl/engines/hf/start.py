"""Builds the HF engine's model without values: divided, quantized and with adapters, by the settings."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from spmdrl.config.engines import pushed_parts
from spmdrl.config.schema import Config
from spmdrl.engines.hf.quantize import QuantizedLinear, quantize
from spmdrl.engines.hf.tp import divide
from spmdrl.hub.build import DTYPES, empty_model, give_memory
from spmdrl.hub.folder import read_config
from spmdrl.hub.lora import attach
from spmdrl.hub.resolve import resolve
from spmdrl.spmd.world import World
from spmdrl.weights.reshard import Box
from spmdrl_kernels.host import use_host_linear


@dataclass
class Started:
    """One rank's part of the model. Its weights are undefined; buffers that no checkpoint holds have their values."""

    model: Any
    group: dist.ProcessGroup | None = None
    """Ranks over which layers are divided; None if layers are whole."""
    boxes: dict[str, Box] = field(default_factory=dict)
    """This rank's box of each divided parameter."""
    quantized: dict[str, QuantizedLinear] = field(default_factory=dict)
    """8-bit layers, by the name of their weight."""


def start(cfg: Config, world: World) -> Started:
    """Build this rank's part of the model from config.json only, and allocate its memory on the rank's device."""
    trust, dtype = cfg.model.trust_remote_code, DTYPES[cfg.model.dtype]
    folder = resolve(cfg.model.path, trust)
    config = read_config(folder, trust).get_text_config()
    # torch's fused attention cannot cap scores (Gemma 2), and transformers then silently omits the cap. None means the
    # fused attention for families that have it.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    out = Started(empty_model(folder, dtype, trust, attention))
    if "adapter" in pushed_parts(cfg):
        attach(out.model, cfg.lora, cfg.run.seed, dtype, scaled=True)
    out.model.requires_grad_(False)
    if cfg.rollout.tp > 1:
        out.group = world.rollout_mesh.get_group("tp")
        out.boxes = divide(out.model, world.engine_tp_rank, out.group)
    if cfg.rollout.quantization != "none":
        out.quantized = quantize(out.model, cfg.rollout.quantization)
    use_host_linear(out.model)
    # After the division, so that a rank never allocates more than its own part.
    give_memory(out.model, world.device)
    return out
