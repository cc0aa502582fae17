"""Describes a model for Megatron and maps its parameters to HF checkpoint names.

`families.py` creates the description from an HF config. This module does not import Megatron.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Names = dict[str, tuple[str, ...]]
"""Maps a Megatron layer parameter to the names of the HF tensors that it combines. `E` stands for the expert index."""


@dataclass
class Architecture:
    """A model description, from which `model.py` builds the model."""

    settings: dict
    """Keyword arguments of Megatron's TransformerConfig, or of MLATransformerConfig with `multi_latent_attention`."""
    names: Names
    vocab: int
    positions: int
    """Maximum sequence length in tokens."""
    tied: bool
    """True if the output head is tied to the embedding."""
    rope_base: float
    rotary_share: float = 1.0
    """Fraction of the head dimension, starting at the first channel, that rotary embeddings apply to."""
    frequencies: torch.Tensor | None = None
    """Rotary frequencies, float32 [rotated channels / 2], or None to compute them from `rope_base`."""
    softcap: float | None = None
    """Cap on attention scores, as softcap * tanh(score / softcap), or None for no cap."""
    embedding_scale: float | None = None
    """Scale of the token embeddings, or None for 1."""
    post_norms: bool = False
    """True if attention and feed-forward outputs are normalized before they are added to the residual stream."""
    beside: str = ""
    """Name prefix of checkpoint tensors that are not trained, such as a vision tower."""


@dataclass(frozen=True)
class Family:
    """An architecture's deviations from the common settings and parameter names."""

    adapt: Callable[[Any, Architecture], None] = lambda h, a: None
    """Function of an HF config and an `Architecture` with common settings; it applies the family's settings in
    place."""
    names: Names = field(default_factory=dict)
    partial_rotary: bool = False
    """True if transformers respects `partial_rotary_factor` in this family; it is ignored in all others."""


# ── names ────────────────────────────────────────────────────────────────────

NAMES: Names = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.experts.E.linear_fc1.weight": ("mlp.experts.E.gate_proj.weight", "mlp.experts.E.up_proj.weight"),
    "mlp.experts.E.linear_fc2.weight": ("mlp.experts.E.down_proj.weight",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "output_layer.bias": "score.bias",
}
"""Maps non-layer parameters to names of HF tensors."""
LATENT: Names = {
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
}
GEMMA2: Names = {
    "self_attention.linear_proj.post_norm.weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp.linear_fc2.post_norm.weight": ("post_feedforward_layernorm.weight",),
}
MIXTRAL: Names = {
    "mlp.router.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.E.linear_fc1.weight": ("block_sparse_moe.experts.E.w1.weight", "block_sparse_moe.experts.E.w3.weight"),
    "mlp.experts.E.linear_fc2.weight": ("block_sparse_moe.experts.E.w2.weight",),
}
