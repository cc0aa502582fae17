"""Translates HF architectures into TransformerConfig settings and parameter names for Megatron.

A family consists of a function that extends the common settings and a table (`arch.py`) of the checkpoint names that
differ from the common names. `FAMILIES` lists all families. This module does not import Megatron.
"""

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from spmdrl.policy.megatron.arch import GEMMA2, LATENT, MIXTRAL, NAMES, Architecture, Family

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embedding types whose frequencies do not depend on the sequence length."""


def describe(h: Any) -> Architecture:
    """Translate an HF config into an `Architecture`.

    Raises:
        ValueError: the architecture is not supported, or its converter does not support a setting.
    """
    if h.model_type not in FAMILIES:
        raise ValueError(
            f"--policy.backend megatron has no converter for {h.model_type}; it has converters for "
            f"{', '.join(FAMILIES)}. "
            "docs/megatron.md shows how to add one; --policy.backend fsdp trains any model of transformers"
        )
    family = FAMILIES[h.model_type]
    # For a vision-language model, only the language model is built, so only its config matters.
    text = h.get_text_config()
    out = _common(text, bool(h.tie_word_embeddings))
    out.names |= family.names
    family.adapt(text, out)
    if out.rotary_share != 1.0 and not family.partial_rotary:
        raise _refuse(text, "partial_rotary_factor")
    return out


def _refuse(h: Any, what: str) -> ValueError:
    return ValueError(
        f"--policy.backend megatron: {what} is not supported for {h.model_type}; use --policy.backend fsdp"
    )


def _common(h: Any, tied: bool) -> Architecture:
    if getattr(h, "quantization_config", None):
        raise _refuse(h, "a quantized checkpoint")
    act = getattr(h, "hidden_activation", None) or getattr(h, "hidden_act", None)
    missing = [n for n in ("rms_norm_eps", "intermediate_size") if not hasattr(h, n)] + ["hidden_act"] * (not act)
    if missing:
        raise ValueError(
            f"--policy.backend megatron needs RMSNorm and a gated MLP: the config of {h.model_type} has no "
            f"{' and no '.join(missing)}; --policy.backend fsdp trains any model of transformers"
        )
    if act not in ACTIVATIONS:
        raise _refuse(h, f"the activation {act}")
    if getattr(h, "mlp_bias", False):
        raise _refuse(h, "mlp_bias")
    heads = h.num_attention_heads
    settings = dict(
        num_layers=h.num_hidden_layers,
        hidden_size=h.hidden_size,
        num_attention_heads=heads,
        ffn_hidden_size=h.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=h.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[act],
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    windows = [int(kind == "sliding_attention") for kind in getattr(h, "layer_types", None) or []]
    window = getattr(h, "sliding_window", None)
    if not windows and window and getattr(h, "use_sliding_window", True):
        windows = [1] * h.num_hidden_layers
    if any(windows) and window:
        # HF's window includes the query's own token, but Megatron's does not.
        settings |= dict(window_size=(window - 1, 0), window_attn_skip_freq=windows)
    out = Architecture(settings, dict(NAMES), h.vocab_size, h.max_position_embeddings, tied, rope_base=0.0)
    if not hasattr(h, "kv_lora_rank"):
        size = getattr(h, "head_dim", None) or h.hidden_size // heads
        settings |= dict(num_query_groups=h.num_key_value_heads, kv_channels=size, softmax_scale=size**-0.5)
        # The rotary factor scales both queries and keys, so scores are scaled by its square.
        settings["softmax_scale"] *= _rope(h, out) ** 2
    return out


def _rope(h: Any, out: Architecture) -> float:
    """Set rotary base and frequencies; return the embedding's scale factor for queries and keys."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = h.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ROPE:
        raise _refuse(h, f"rope_type {kind}")
    out.rotary_share = float(rope.get("partial_rotary_factor", 1.0))
    out.rope_base = float(rope["rope_theta"])
    if kind == "default":
        return 1.0
    out.frequencies, factor = ROPE_INIT_FUNCTIONS[kind](h, torch.device("cpu"))
    if factor != 1.0 and out.rotary_share != 1.0:
        # The factor would only apply to some channels of a head, so it cannot be folded into the softmax scale.
        raise _refuse(h, f"rope_type {kind} with a partial_rotary_factor")
    return factor


# ── families ─────────────────────────────────────────────────────────────────


def _llama(h: Any, out: Architecture) -> None:
    if getattr(h, "attention_bias", False):
        raise _refuse(h, "attention_bias")


def _qwen2(h: Any, out: Architecture) -> None:
    out.settings["add_qkv_bias"] = True


def _qwen2_5_vl(h: Any, out: Architecture) -> None:
    # For text, the multimodal rotary embedding equals the standard one, because the three position components of a text
    # token are identical.
    _qwen2(h, out)
    out.beside = "visual."


def _qwen3(h: Any, out: Architecture) -> None:
    _llama(h, out)
    out.settings["qk_layernorm"] = True


def _experts(h: Any, out: Architecture, experts: int, columns: int, sparse: list[int], **more: Any) -> None:
    out.settings |= dict(
        num_moe_experts=experts,
        moe_router_topk=h.num_experts_per_tok,
        moe_ffn_hidden_size=columns,
        moe_layer_freq=sparse,
        # Disable Megatron's load-balancing loss, which depends on the layout, unlike the loss in `routing.py`.
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        **more,
    )


def _qwen3_moe(h: Any, out: Architecture) -> None:
    _qwen3(h, out)
    layers = range(h.num_hidden_layers)
    sparse = [int((i + 1) % h.decoder_sparse_step == 0 and i not in (h.mlp_only_layers or [])) for i in layers]
    # With norm_topk_prob, the weights of the chosen experts sum to 1. This equals a softmax over only these experts,
    # which Megatron computes if moe_router_pre_softmax is false.
    before = not h.norm_topk_prob
    _experts(h, out, h.num_experts, h.moe_intermediate_size, sparse, moe_router_pre_softmax=before)


def _mixtral(h: Any, out: Architecture) -> None:
    _experts(h, out, h.num_local_experts, h.intermediate_size, [1] * h.num_hidden_layers)


def _biased_experts(h: Any, out: Architecture) -> None:
    """Add DeepSeek-V3's MoE: sigmoid scores, a bias for selection only, shared experts, dense layers."""
    if not h.norm_topk_prob:
        raise _refuse(h, "norm_topk_prob set to false")
    # Expert groups only restrict the choice if a token cannot use all of them.
    limited = h.n_group != h.topk_group
    if limited and h.num_experts_per_tok // h.topk_group != 2:
        # Megatron scores a group by its top (topk // topk_group) experts, and transformers by its top two.
        raise _refuse(h, "num_experts_per_tok other than twice topk_group")
    dense = h.first_k_dense_replace
    _experts(
        h,
        out,
        h.n_routed_experts,
        h.moe_intermediate_size,
        [int(i >= dense) for i in range(h.num_hidden_layers)],
        moe_shared_expert_intermediate_size=h.moe_intermediate_size * h.n_shared_experts,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # Megatron must not update the bias, because engines route with the same bias (see `routing.move_biases`).
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=h.routed_scaling_factor,
        moe_router_num_groups=h.n_group if limited else None,
        moe_router_group_topk=h.topk_group if limited else None,
    )


def _deepseek_v3(h: Any, out: Architecture) -> None:
    _llama(h, out)
    if not getattr(h, "rope_interleave", True):
        raise _refuse(h, "rope_interleave set to false")
    _biased_experts(h, out)
    head, rope = h.qk_nope_head_dim + h.qk_rope_head_dim, h.rope_parameters
    # The rotary factor would only apply to the rotary part of a head, so it cannot be folded into the softmax scale.
    rotary = copy(h)
    rotary.head_dim = h.qk_rope_head_dim
    if _rope(rotary, out) != 1.0:
        raise _refuse(h, "yarn with an mscale that differs from mscale_all_dim")
    out.settings |= dict(
        multi_latent_attention=True,
        q_lora_rank=h.q_lora_rank,
        kv_lora_rank=h.kv_lora_rank,
        qk_head_dim=h.qk_nope_head_dim,
        qk_pos_emb_head_dim=h.qk_rope_head_dim,
        v_head_dim=h.v_head_dim,
        kv_channels=head,
        # Use the type `rope`, which accepts any frequencies. For yarn, rotary_scaling_factor and mscale_all_dim affect
        # the softmax scale.
        rope_type="rope",
        rotary_base=out.rope_base,
        rotary_scaling_factor=rope.get("factor") or 1.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        qk_layernorm=True,
    )


def _glm4_moe(h: Any, out: Architecture) -> None:
    out.settings |= dict(add_qkv_bias=h.attention_bias, qk_layernorm=h.use_qk_norm)
    _biased_experts(h, out)


def _gemma2(h: Any, out: Architecture) -> None:
    _llama(h, out)
    scale = out.settings["softmax_scale"] * out.settings["kv_channels"] ** 0.5
    out.settings |= dict(softmax_scale=scale * h.query_pre_attn_scalar**-0.5, layernorm_zero_centered_gamma=True)
    out.softcap = h.attn_logit_softcapping
    out.embedding_scale = h.hidden_size**0.5
    out.post_norms = True


FAMILIES = {
    "llama": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen2_5_vl": Family(_qwen2_5_vl),
    "qwen3": Family(_qwen3),
    "qwen3_moe": Family(_qwen3_moe),
    "mixtral": Family(_mixtral, MIXTRAL),
    "deepseek_v3": Family(_deepseek_v3, LATENT),
    "glm4_moe": Family(_glm4_moe, partial_rotary=True),
    "gemma2": Family(_gemma2, GEMMA2),
}
"""Families by `model_type` in the HF config."""
