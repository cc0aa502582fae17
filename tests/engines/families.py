"""Tiny random models of the families of transformers, for the table of docs/models.md.

`FAMILIES` holds a family's `model_type` and what its config needs beside `SMALL`. A name with a space is a variant of
the family before it. `make(name, folder)` writes a folder with random weights in float32 and the tokenizer of `tiny`.
"""

import shutil
from pathlib import Path
from typing import Any

from benchmarks._models import TINY

SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
"""Sizes of most families. vLLM on a CPU takes heads of 32 channels and more."""
MIXTURE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
ROUTED: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
LATENT: dict[str, Any] = dict(
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    head_dim=16,
    num_key_value_heads=4,
)
NARROW: dict[str, Any] = dict(num_attention_heads=2, num_key_value_heads=2)
"""Heads of families that compute their width from the hidden size."""
MAMBA: dict[str, Any] = dict(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
GATED_DELTA: dict[str, Any] = dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
)
SLIDING = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    # attention over all tokens
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama yarn": {"rope_parameters": YARN},
    "qwen2": NARROW,
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "ministral": {"sliding_window": 6},
    "ministral3": {},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 32, "layer_types": SLIDING},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": [96] * 4,
        "sliding_window": 6,
        "num_kv_shared_layers": 2,
        "layer_types": SLIDING * 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "sliding_window": 6,
        "layer_types": SLIDING,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 0,
    },
    "vaultgemma": {"sliding_window": 6, "query_pre_attn_scalar": 32},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "phi3 longrope": NARROW
    | {
        "head_dim": 32,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": 64,
        },
    },
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {},
    "cohere": {},
    "cohere2": {"sliding_window": 6, "layer_types": SLIDING},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "layer_types": SLIDING},
    "smollm3": {},
    "starcoder2": {"sliding_window": 6},
    "stablelm": NARROW,
    "nemotron": {},
    "exaone4": {"sliding_window": 6, "layer_types": SLIDING},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "apertus": {},
    "arcee": {},
    "helium": {"num_attention_heads": 2},
    "hyperclovax": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "bitnet": NARROW,
    "diffllama": {},
    "cwm": {"sliding_window": 6, "layer_types": SLIDING},
    "jais2": {},
    "mellum": MIXTURE,
    "nanochat": {},
    "persimmon": NARROW,
    "minicpm3": LATENT | {"dim_model_base": 32, "scale_emb": 2},
    # transformers zeroes the padding token's embedding of a loaded youtu.
    "youtu": LATENT | {"pad_token_id": None},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": SLIDING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    # learned or relative positions, and no attention of transformers' interface
    "gpt2": NARROW | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2, "window_size": 6},
    "gpt_neox": {"num_attention_heads": 2},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 16},
    "gpt_bigcode": NARROW | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "rotary_dim": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_attention_heads": 2},
    "biogpt": {"num_attention_heads": 2},
    "bloom": NARROW | {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 256},
    "falcon": {"num_attention_heads": 2},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 2, "ffn_dim": 96},
    "doge": {},
    # mixtures of experts
    "qwen2_moe": NARROW | MIXTURE | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": MIXTURE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": NARROW | {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": NARROW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": NARROW | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": ROUTED | LATENT,
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "dots1": ROUTED,
    "solar_open": ROUTED,
    "exaone_moe": MIXTURE | {"num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "afmoe": MIXTURE | {"num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 6, "layer_types": SLIDING},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 256,
    },
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 32},
    "dbrx": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "d_model": 64,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "longcat_flash": LATENT
    | {
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 48,
        "ffn_hidden_size": 96,
        "num_layers": 1,
    },
    "mimo_v2_flash": ROUTED | {"sliding_window": 6, "layer_types": SLIDING},
    "deepseek_v32": ROUTED | LATENT | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 256},
    "glm_moe_dsa": ROUTED | LATENT | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 256},
    # states that pass from token to token
    "qwen3_next": MIXTURE | GATED_DELTA | {"shared_expert_intermediate_size": 48},
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": MIXTURE | GATED_DELTA | {"shared_expert_intermediate_size": 48},
    "olmo_hybrid": GATED_DELTA,
    "kimi_linear": LATENT
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "lfm2": NARROW
    | {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        # vLLM reads the names of the first published configs.
        "conv_dim": 64,
        "block_dim": 64,
    },
    "lfm2_moe": NARROW | MIXTURE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "bamba": MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "granitemoehybrid": NARROW
    | MAMBA
    | {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 8,
    }
    | {k: v for k, v in ROUTED.items() if k != "first_k_dense_replace"}
    | {"moe_shared_expert_intermediate_size": 48},
    "jamba": NARROW
    | MAMBA
    | {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "mamba": {"state_size": 16, "use_mambapy": False},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 16},
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 64,
        "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "xlstm": {"num_heads": 4},
    "rwkv": {"attention_hidden_size": 64, "context_length": 256},
}


NO_HEAD_DIM = ("falcon",)
"""Families whose config takes no `head_dim`."""


def config_of(name: str) -> Any:
    """Return the config of a family's tiny model; a variant's name begins with the family's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name.split()[0]]
    settings = SMALL | FAMILIES[name]
    return kind(**{key: value for key, value in settings.items() if key != "head_dim" or name not in NO_HEAD_DIM})


def make(name: str, folder: Path) -> Path:
    """Write a family's tiny model with random weights and the tokenizer of `tiny`; return the folder.

    All weights are drawn, norms and biases too, so that no part is hidden by starting at 0 or 1.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
