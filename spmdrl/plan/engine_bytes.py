"""Computes the size of an engine's weights, workspace and KV cache per rank from the model config and the settings.

Weights include adapters and any tensors that the engine derives from weights. As in the engine, the cache consists of
whole blocks. The workspace is estimated from the buffers listed in `workspace_of`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.engines import engine_name, pushed_parts
from spmdrl.config.judge import judged_tokens
from spmdrl.config.schema import Config
from spmdrl.engines.engine import kv_bytes_per_token
from spmdrl.engines.hf.start import language_of
from spmdrl.engines.sglang.options import CPU_KV_BYTES, SPARE_TOKENS
from spmdrl.engines.vllm.cpu import CPU_BLOCK, MOST_PACKED, cpu_kv_bytes
from spmdrl.engines.vllm.options import GPU_BLOCK
from spmdrl.hub.build import DTYPES, language_model_class
from spmdrl.hub.lora import ALL_LINEAR, is_adapter
from spmdrl.plan.engine_boxes import Cut, EngineLayout, Kind
from spmdrl.plan.images import encoder_bytes
from spmdrl.weights.boxes import Entry, size
from spmdrl.weights.experts import Layout, full_box

GIB = 1 << 30
MLA_BLOCK = 64
"""KV block size, in tokens, of vLLM's latent attention kernels on Hopper (`v1/attention/backends/mla`)."""
CPU_MLA_BLOCK = 16
"""KV block size, in tokens, of vLLM's CPU kernel for latent attention (`platforms/cpu.py`)."""
OUTSIDE = GIB
"""Estimated GPU memory in bytes that an engine uses outside torch: communication buffers, kernels, CUDA graphs."""


@dataclass
class Cache:
    """An engine's KV cache on one rank."""

    bytes: int
    tokens: int
    """Total number of tokens that fit."""
    sequences: int
    """Number of maximum-length sequences that fit."""
    lack: int = 0
    """Additional bytes needed to fit one maximum-length sequence, or 0 if it fits."""


def kind_of(cfg: Config, on_gpu: bool) -> Kind:
    """Return the engine that a run would use. On GPUs, `auto` selects vLLM if it supports the dtype, or else hf."""
    if cfg.rollout.engine == "auto" and on_gpu:
        return "vllm" if cfg.model.dtype != "float64" else "hf"
    name = engine_name(cfg)
    return "sglang" if name == "sglang" else "vllm" if name == "vllm" else "hf"


def longest_of(cfg: Config, config: Any) -> int:
    """Return the maximum sequence length in tokens, as `engines.engine.longest_sequence` does for a model folder."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return min(max(cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens, judged_tokens(cfg)), positions)


def batch_tokens(cfg: Config, layout: EngineLayout, longest: int, gpu_memory: int) -> int:
    """Return the maximum number of tokens per forward pass on a GPU rank under the engine's defaults.

    vLLM's `EngineArgs.get_batch_defaults` gives `LLM` 16,384 tokens on GPUs of 70 GiB and more, else 8,192.
    SGLang uses the prefill chunk size from `arg_groups/memory_hook.py`, divided by the number of attention replicas.
    The HF engine prefills the prompts of a full batch in one forward pass.
    """
    if layout.kind == "sglang":
        chunks = ((160, 16384), (60, 8192), (20, 4096), (0, 2048))
        return next(chunk for least, chunk in chunks if gpu_memory >= least * GIB) // layout.dp
    if layout.kind == "vllm":
        most = 16384 if gpu_memory >= 70 * GIB else 8192
        return min(most, -(-cfg.rollout.max_sequences // layout.dp) * longest)
    return cfg.rollout.max_sequences * min(longest, cfg.rollout.max_prompt_tokens)


def workspace_of(cfg: Config, layout: EngineLayout, longest: int, gpu_memory: int) -> dict[str, int]:
    """Estimate the bytes that an engine on a GPU needs in addition to weights and cache, by purpose.

    T is the number of tokens in a forward pass, H the hidden size, V the vocabulary size, S the number of sequences, K
    the number of experts per token, I the expert intermediate size.

    - `logits` covers the logits and the log-probabilities, each float32 [S, V].
    - `hidden states` covers the residual, a layer's input and the widest layer's output, each [T, ...].
    - `experts` covers vLLM's two workspaces, each [T over all replicas, K, max(H, 2I)]
      (`TritonExperts.workspace_shapes`).
    - `images` covers the vision tower and the features of as many image tokens as a forward pass has tokens
      (`MultiModalBudget`).
    - `latent prefill` covers the keys and values that latent attention decompresses during prefill, for up to 65,536
      cached tokens (`MLACommonMetadataBuilder`).
    """
    text, width = layout.config, DTYPES[cfg.model.dtype].itemsize
    tokens = batch_tokens(cfg, layout, longest, gpu_memory)
    rows = -(-cfg.rollout.max_sequences // layout.dp)
    hidden, heads = text.hidden_size, layout.heads // layout.tp
    head = getattr(text, "v_head_dim", None) or getattr(text, "head_dim", None) or hidden // layout.heads
    wide = max(3 * (getattr(text, "intermediate_size", None) or 0) // layout.tp, 4 * heads * head)
    out = {
        "logits": 2 * 4 * rows * text.vocab_size,
        "hidden states": tokens * (3 * hidden + wide) * width,
    }
    if layout.experts:
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        inner = inner if layout.ep > 1 else -(-inner // layout.ranks)
        chosen = getattr(text, "num_experts_per_tok", None) or 1
        out["experts"] = 2 * tokens * layout.dp * chosen * max(hidden, 2 * inner) * width
    if rank := getattr(text, "kv_lora_rank", None):
        cached = min(max(8 * longest, 4 * rows * MLA_BLOCK), 65536)
        unpacked = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
        out["latent prefill"] = cached * (rank + text.qk_rope_head_dim + unpacked) * width
    if layout.tower:
        out["images"] = encoder_bytes(layout.whole_config, tokens, layout.tp if layout.kind != "hf" else 1, width)
    out["rotary tables"] = rotary_bytes(text)
    out["communication and graphs"] = OUTSIDE
    return out


def rotary_bytes(text: Any) -> int:
    """Return the size in bytes of the float32 rotary sin/cos table, which all layers share."""
    rotary = getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None)
    return 4 * (getattr(text, "max_position_embeddings", None) or 0) * (rotary or 128)


def cache_of(cfg: Config, layout: EngineLayout, longest: int, held: int, gpu_memory: int | None) -> Cache:
    """Compute the size of one rank's KV cache.

    held: bytes of weights and workspace that share the engine's GPU budget with the cache. gpu_memory: memory of a GPU
    in bytes, or None for a CPU engine.
    """
    text, tp, dtype = layout.config, layout.tp, cfg.model.dtype
    per_token = kv_bytes_per_token(text, dtype, tp)
    fixed, sequences = int(cfg.rollout.kv_cache_gib * GIB), cfg.rollout.max_sequences
    if layout.kind == "hf":
        return _growing(cfg, text, longest, tp, gpu_memory and gpu_memory - held)
    if layout.kind == "vllm":
        block = _block(text, gpu_memory is None)
        one, spare = -(-longest // block) * block, block
    else:
        # SGLang adds one padding page of one token to its pool.
        block, one, spare = 1, longest + SPARE_TOKENS, 1
    if gpu_memory is not None:
        # A fixed size can exceed the GPU's memory; the rollout phase total then shows that the job does not fit.
        free = fixed or int(gpu_memory * cfg.rollout.gpu_memory_utilization) - held
    elif layout.kind == "vllm":
        free = fixed or cpu_kv_bytes(text, sequences, longest, dtype, tp)
    else:
        free = max(fixed or min(CPU_KV_BYTES, sequences * one * per_token), one * per_token)
    if layout.kind == "sglang":
        free += per_token
    tokens = max(0, free // (block * per_token)) * block
    lack = max((one + spare) * per_token - free, 0)
    return Cache(tokens * per_token, max(0, tokens - spare), max(0, tokens - spare) // one, lack)


def _block(text: Any, on_cpu: bool) -> int:
    """Return vLLM's KV block size in tokens."""
    if getattr(text, "kv_lora_rank", None):
        return CPU_MLA_BLOCK if on_cpu else MLA_BLOCK
    return CPU_BLOCK if on_cpu else GPU_BLOCK


def _growing(cfg: Config, text: Any, longest: int, tp: int, free: int | None) -> Cache:
    """Compute the HF engine's cache at its peak, when all sequences of a full batch have maximum length."""
    width = DTYPES[cfg.model.dtype].itemsize
    if getattr(text, "kv_lora_rank", None):
        # transformers caches decompressed keys and values for every head instead of latent vectors.
        head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
        per_token = text.num_hidden_layers * text.num_attention_heads // tp * head * width
    else:
        per_token = kv_bytes_per_token(text, "float32", tp) * width // 4
    rows = 1 if cfg.rollout.deterministic else cfg.rollout.max_sequences
    fits = rows if free is None else max(0, min(rows, free // (longest * per_token)))
    lack = 0 if free is None else max(0, longest * per_token - free)
    return Cache(fits * longest * per_token, fits * longest, fits, lack)


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM 0.32 supports; it pads adapters to the next one (`vllm.config.lora.MaxLoRARanks`)."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Groups of layers that vLLM fuses. If any layer of a group has an adapter, vLLM allocates adapters for all of them."""


@dataclass
class Model:
    """The tensors of a checkpoint, without their values."""

    entries: list[Entry]
    linear: set[str] = field(default_factory=set)
    """Weight names of all linear layers of the language model except the head. The HF engine can quantize them, and
    LoRA can adapt them."""
    buffers: set[str] = field(default_factory=set)
    """Names of persistent buffers (routing biases), which the HF engine's byte count omits."""


@dataclass
class Weights:
    """Size of an engine's parameters on one rank."""

    bytes: int = 0
    """Bytes of parameters and adapters, as reported by a real engine's `bytes_by_owner` before sampling."""
    beside: int = 0
    """Bytes of matrices that the engine derives from its weights but does not count as parameters."""
    packed: int = 0
    """Bytes that vLLM's CPU build adds when it first samples: linear weights repacked into its kernels' layout."""
    unknown: list[str] = field(default_factory=list)
    """Names of tensors that match no rule and are counted at full size."""


def model_of(config: Any, trust_remote_code: bool = False) -> Model:
    """Return the tensors in a model's checkpoint: parameters (tied ones only once) and persistent buffers."""
    with torch.device("meta"):
        hf = language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    kept = hf.state_dict().keys()
    buffers = {name: x for name, x in hf.named_buffers() if name in kept}
    tensors = dict(hf.named_parameters()) | buffers
    layout = Layout(hf)
    slots = {name: layout.slots(name, tuple(x.shape), full_box(x.shape)) for name, x in tensors.items()}
    prefix, language = language_of(hf)
    layers = {f"{prefix}{n}.weight" for n, m in language.named_modules() if type(m) is torch.nn.Linear}
    # Checkpoints of some families have other names than parameters.
    linear = {slot.name for name in layers & slots.keys() for slot in slots[name]}
    return Model([Entry(s.name, s.shape) for some in slots.values() for s in some], linear, set(buffers))


def weights_of(cfg: Config, layout: EngineLayout, model: Model, place: int, on_cpu: bool) -> Weights:
    """Return the size of an engine's parameters on rank `place` of the engine."""
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
        # Latent attention uses views of kv_b_proj's weight and never calls the layer, so vLLM does not repack it.
        layer = cut.group in ("linear", "whole") and "kv_b_proj" not in name
        if len(entry.shape) == 2 and (layer or (cut.group == "vocabulary" and ("lm_head" in name or tied))):
            out.packed += held
    out.packed = min(out.packed, MOST_PACKED) if layout.kind == "vllm" and on_cpu else 0
    # Latent attention splits kv_b_proj into W_UK and W_UV. In vLLM, both are views of the kv_b_proj weight, or copies
    # if that weight is quantized. In SGLang, both are always copies.
    text = layout.config
    if rank := getattr(text, "kv_lora_rank", None):
        absorbed = text.num_hidden_layers * layout.heads // layout.tp * rank * (text.qk_nope_head_dim + text.v_head_dim)
        if layout.kind == "vllm" and cfg.rollout.quantization != "none":
            out.bytes += absorbed * width
        if layout.kind == "sglang":
            out.beside += absorbed * width
    return out


def _bytes_of(cfg: Config, layout: EngineLayout, model: Model, entry: Entry, cut: Cut) -> int:
    """Return the size of one tensor on a rank, in the engine's dtype or quantized to 8 bits plus scales."""
    numbers = sum(size(box) for box in cut.boxes)
    if cut.group == "vocabulary":
        numbers = math.prod(entry.shape[1:]) * layout.vocab_rows(entry.name.split(".")[-2], entry.shape[0])
    rounds = entry.name in model.linear if layout.kind == "hf" else cut.group in ("linear", "expert")
    if cfg.rollout.quantization != "none" and rounds and len(entry.shape) > 1:
        # vLLM and SGLang store one scale per matrix, the HF engine one per row.
        scales = sum(box[0][1] - box[0][0] for box in cut.boxes) if layout.kind == "hf" else len(cut.boxes)
        return numbers + 4 * scales
    # Engines keep routing biases in float32; vLLM also keeps GLM-4.5 router weights in float32.
    router = entry.name.endswith("mlp.gate.weight") and layout.config.model_type == "glm4_moe"
    wide = entry.name.endswith("e_score_correction_bias") or (router and layout.kind == "vllm")
    return numbers * (4 if wide and layout.kind != "hf" else DTYPES[cfg.model.dtype].itemsize)


def _adapter_bytes(cfg: Config, layout: EngineLayout, model: Model, name: str, cut: Cut) -> int:
    """Return the size of a layer's adapter, A [r, in] and B [out, r], on a rank, or 0 if it has none."""
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
