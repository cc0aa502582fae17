"""An engine's workspace and KV cache in bytes, from the model's config and the settings.

A token's bytes in the cache are those of the engine itself; the workspace is an estimate from the named buffers.
"""

from dataclasses import dataclass
from typing import Any

from spmdrl.config.engines import engine_name
from spmdrl.config.judge import judged_tokens
from spmdrl.config.schema import Config
from spmdrl.engines.engine import kv_bytes_per_token
from spmdrl.engines.sglang.options import CPU_KV_BYTES, SPARE_TOKENS
from spmdrl.engines.vllm.cpu import CPU_BLOCK, cpu_kv_bytes
from spmdrl.engines.vllm.options import GPU_BLOCK
from spmdrl.hub.build import DTYPES
from spmdrl.plan.engine_boxes import EngineLayout, Kind

GIB = 1 << 30
MLA_BLOCK = 64
"""Tokens in one KV block of vLLM's kernels for latent attention on Hopper (`v1/attention/backends/mla`)."""
CPU_MLA_BLOCK = 16
"""The same for vLLM's CPU kernel (`platforms/cpu.py`)."""
OUTSIDE = GIB
"""Estimated bytes of a GPU for an engine's communication buffers, kernels and graphs, beside torch's own."""


@dataclass
class Cache:
    """An engine's KV cache on one rank."""

    bytes: int
    tokens: int
    """Tokens that it holds, of all sequences together."""
    sequences: int
    """Sequences of the longest length that it holds."""
    lack: int = 0
    """Bytes that are missing for one sequence of the longest length; 0 if it fits."""


def kind_of(cfg: Config, on_gpu: bool) -> Kind:
    """Return the engine that a run would use; for a plan of a GPU, vLLM need not be installed."""
    if cfg.rollout.engine == "auto" and on_gpu:
        return "vllm" if cfg.model.dtype != "float64" else "hf"
    name = engine_name(cfg)
    return "sglang" if name == "sglang" else "vllm" if name == "vllm" else "hf"


def longest_of(cfg: Config, config: Any) -> int:
    """Return `rollout.engine.longest_sequence` from a config that is already loaded."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return min(max(cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens, judged_tokens(cfg)), positions)


def batch_tokens(cfg: Config, layout: EngineLayout, longest: int, gpu_memory: int) -> int:
    """Return the largest number of tokens in one forward of a rank on a GPU, by the engine's own defaults.

    vLLM's `EngineArgs.get_batch_defaults` gives `LLM` 16,384 on GPUs of 70 GiB and more, else 8,192; SGLang's prefill
    chunk, which copies of the attention share, is in `arg_groups/memory_hook.py`.
    """
    if layout.kind == "sglang":
        chunks = ((160, 16384), (60, 8192), (20, 4096), (0, 2048))
        return next(chunk for least, chunk in chunks if gpu_memory >= least * GIB) // layout.dp
    if layout.kind == "vllm":
        most = 16384 if gpu_memory >= 70 * GIB else 8192
        return min(most, -(-cfg.rollout.max_sequences // layout.dp) * longest)
    return cfg.rollout.max_sequences * min(longest, cfg.rollout.max_prompt_tokens)


def workspace_of(cfg: Config, layout: EngineLayout, longest: int, gpu_memory: int) -> dict[str, int]:
    """Estimate the bytes of an engine on a GPU beside weights and cache, by purpose.

    T tokens of a forward, H hidden size, V vocabulary, S sequences, K experts of a token. Logits: float32 [S, V] for
    the logits and their log-probabilities. Hidden states: residual, a layer's input and the widest layer's output,
    [T, ...]. Experts: vLLM's two workspaces [T of all copies, K, max(H, 2I)] (`TritonExperts.workspace_shapes`). Latent
    attention: keys and values that a prefill of up to 65,536 cached tokens unpacks (`MLACommonMetadataBuilder`).
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
    out["rotary tables"] = rotary_bytes(text)
    out["communication and graphs"] = OUTSIDE
    return out


def rotary_bytes(text: Any) -> int:
    """Return the bytes of the table of sines and cosines, one for all layers, in float32."""
    rotary = getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None)
    return 4 * (getattr(text, "max_position_embeddings", None) or 0) * (rotary or 128)


def cache_of(cfg: Config, layout: EngineLayout, longest: int, held: int, gpu_memory: int | None) -> Cache:
    """Size the KV cache of one rank.

    held: bytes of weights and workspace that count in the engine's share of a GPU. gpu_memory: bytes of a GPU; None for
    an engine on a CPU.
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
        # SGLang pads its pool by one page, which has one token.
        block, one, spare = 1, longest + SPARE_TOKENS, 1
    if gpu_memory is not None:
        # A fixed size beyond the GPU shows in the sum of the rollout.
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
    """Return the number of tokens in one block of vLLM's cache."""
    if getattr(text, "kv_lora_rank", None):
        return CPU_MLA_BLOCK if on_cpu else MLA_BLOCK
    return CPU_BLOCK if on_cpu else GPU_BLOCK


def _growing(cfg: Config, text: Any, longest: int, tp: int, free: int | None) -> Cache:
    """Size the HF engine's cache when a full group of rows has reached the longest length; it starts empty."""
    width = DTYPES[cfg.model.dtype].itemsize
    if getattr(text, "kv_lora_rank", None):
        # transformers caches the keys and values of every head.
        head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
        per_token = text.num_hidden_layers * text.num_attention_heads // tp * head * width
    else:
        per_token = kv_bytes_per_token(text, "float32", tp) * width // 4
    rows = 1 if cfg.rollout.deterministic else cfg.rollout.max_sequences
    fits = rows if free is None else max(0, min(rows, free // (longest * per_token)))
    lack = 0 if free is None else max(0, longest * per_token - free)
    return Cache(fits * longest * per_token, fits * longest, fits, lack)
