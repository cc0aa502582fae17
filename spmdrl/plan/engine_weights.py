"""Counts the parameters of an engine on one rank in bytes, including adapters and copies beside them."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.engines import pushed_parts
from spmdrl.config.schema import Config
from spmdrl.engines.vllm.cpu import MOST_PACKED
from spmdrl.hub.build import DTYPES
from spmdrl.hub.lora import ALL_LINEAR, is_adapter
from spmdrl.plan.engine_boxes import Cut, EngineLayout
from spmdrl.weights.boxes import Entry, size
from spmdrl.weights.experts import Layout, full_box

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks to which vLLM 0.32 pads adapters (`vllm.config.lora.MaxLoRARanks`)."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM fuses into one: if one has an adapter, all have its buffers."""


@dataclass
class Model:
    """The tensors of a checkpoint, without values."""

    entries: list[Entry]
    linear: set[str] = field(default_factory=set)
    """Weights of the linear layers below the head, which the HF engine quantizes to 8 bits and adapters extend."""
    buffers: set[str] = field(default_factory=set)
    """Persistent buffers (routing biases), which the HF engine does not count."""


@dataclass
class Weights:
    """An engine's parameters on one rank."""

    bytes: int = 0
    """Bytes of parameters and adapters, as `bytes_by_owner` of a real engine reports before it samples."""
    beside: int = 0
    """Bytes of matrices that the engine derives from its weights and does not count as parameters."""
    packed: int = 0
    """Bytes that vLLM's CPU build adds when it first samples: copies of linear layers in its kernels' layout."""
    unknown: list[str] = field(default_factory=list)
    """Names that no rule covers, taken as whole."""


def model_of(config: Any, trust_remote_code: bool = False) -> Model:
    """List the tensors of a model's checkpoint from its config: parameters, tied ones once, and persistent buffers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    kept = hf.state_dict().keys()
    buffers = {name: x for name, x in hf.named_buffers() if name in kept}
    tensors = dict(hf.named_parameters()) | buffers
    layout = Layout(hf)
    slots = [s for name, x in tensors.items() for s in layout.slots(name, tuple(x.shape), full_box(x.shape))]
    prefix = f"{hf.base_model_prefix}."
    linear = {f"{prefix}{n}.weight" for n, m in hf.base_model.named_modules() if type(m) is torch.nn.Linear}
    return Model([Entry(s.name, s.shape) for s in slots], linear, set(buffers))


def weights_of(cfg: Config, layout: EngineLayout, model: Model, place: int, on_cpu: bool) -> Weights:
    """Return the parameters of the rank at `place` of an engine."""
    out, width = Weights(), DTYPES[cfg.model.dtype].itemsize
    tied = not any(entry.name.endswith("lm_head.weight") for entry in model.entries)
    for entry in model.entries:
        name = entry.name
        if is_adapter(name) or (layout.kind == "hf" and name in model.buffers):
            continue
        cut = layout.cut(name, entry.shape, place)
        if cut.group == "unknown":
            out.unknown.append(name)
        held = _bytes_of(cfg, layout, model, entry, cut)
        out.bytes += held + _adapter_bytes(cfg, layout, model, name, cut)
        # Latent attention multiplies by views of kv_b_proj, not by the layer.
        layer = cut.group in ("linear", "whole") and "kv_b_proj" not in name
        if len(entry.shape) == 2 and (layer or (cut.group == "vocabulary" and ("lm_head" in name or tied))):
            out.packed += held
    out.packed = min(out.packed, MOST_PACKED) if layout.kind == "vllm" and on_cpu else 0
    # Latent attention splits kv_b_proj into W_UK and W_UV: vLLM's are views of its weights, or copies if these are
    # quantized, and SGLang's are always copies.
    text = layout.config
    if rank := getattr(text, "kv_lora_rank", None):
        absorbed = text.num_hidden_layers * layout.heads // layout.tp * rank * (text.qk_nope_head_dim + text.v_head_dim)
        if layout.kind == "vllm" and cfg.rollout.quantization != "none":
            out.bytes += absorbed * width
        if layout.kind == "sglang":
            out.beside += absorbed * width
    return out


def _bytes_of(cfg: Config, layout: EngineLayout, model: Model, entry: Entry, cut: Cut) -> int:
    """Return the bytes of one tensor on a rank, in the engine's type or quantized to 8 bits with its scales."""
    numbers = sum(size(box) for box in cut.boxes)
    if cut.group == "vocabulary":
        numbers = math.prod(entry.shape[1:]) * layout.vocab_rows(entry.name.split(".")[-2], entry.shape[0])
    rounds = entry.name in model.linear if layout.kind == "hf" else cut.group in ("linear", "expert")
    if cfg.rollout.quantization != "none" and rounds and len(entry.shape) > 1:
        # vLLM and SGLang keep one scale for each matrix, the HF engine one for each row.
        scales = sum(box[0][1] - box[0][0] for box in cut.boxes) if layout.kind == "hf" else len(cut.boxes)
        return numbers + 4 * scales
    # Engines keep routing biases in float32, and vLLM GLM-4.5's routers too.
    router = entry.name.endswith("mlp.gate.weight") and layout.config.model_type == "glm4_moe"
    wide = entry.name.endswith("e_score_correction_bias") or (router and layout.kind == "vllm")
    return numbers * (4 if wide and layout.kind != "hf" else DTYPES[cfg.model.dtype].itemsize)


def _adapter_bytes(cfg: Config, layout: EngineLayout, model: Model, name: str, cut: Cut) -> int:
    """Return the bytes of A [r, in] and B [out, r] that an engine holds beside a layer's weight."""
    if "adapter" not in pushed_parts(cfg) or name not in model.linear or not cut.boxes:
        return 0
    layer, rank = name.split(".")[-2], cfg.lora.rank
    alike = next((group for group in FUSED if layer in group), (layer,)) if layout.kind == "vllm" else (layer,)
    if ALL_LINEAR not in cfg.lora.targets and not set(alike) & set(cfg.lora.targets):
        return 0
    if layout.kind == "vllm":
        rank = min(padded for padded in VLLM_RANKS if padded >= rank)
    widths = [b - a for box in cut.boxes for a, b in box]
    return rank * sum(widths) * DTYPES[cfg.model.dtype].itemsize
