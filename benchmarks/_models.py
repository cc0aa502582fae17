"""Models for benchmarks and tests: small random models, created on demand, and the sizes of published ones.

python -m benchmarks._models FOLDER    writes a mixture of experts to FOLDER, and a reward for its text to reward.py
"""

import shutil
import sys
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[1] / "spmdrl" / "assets" / "tiny"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return (2 * right - len(solution_str)) / len(ground_truth)
"""
"""Source of a reward file that gives different rewards to different random texts."""

QWEN3_MIXTURE = dict(
    family="Qwen3Moe",
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    head_dim=128,
    num_key_value_heads=4,
    vocab_size=151936,
)
PUBLISHED: dict[str, dict[str, Any]] = {
    # https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
    "Qwen2.5-0.5B": dict(
        family="Qwen2",
        num_hidden_layers=24,
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
    "Qwen2.5-7B": dict(
        family="Qwen2",
        num_hidden_layers=28,
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3-30B-A3B": dict(
        QWEN3_MIXTURE,
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        intermediate_size=6144,
        moe_intermediate_size=768,
    ),
    # https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json
    "Qwen3-235B-A22B": dict(
        QWEN3_MIXTURE,
        num_hidden_layers=94,
        hidden_size=4096,
        num_attention_heads=64,
        intermediate_size=12288,
        moe_intermediate_size=1536,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
    "DeepSeek-V3": dict(
        family="DeepseekV3",
        num_hidden_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=129280,
        tie_word_embeddings=False,
    ),
}
"""Model class in transformers and sizes of published models. Their weights are not needed."""


def config_of(family: str, **settings: Any) -> Any:
    """Return a transformers config of a model family."""
    import transformers

    return getattr(transformers, f"{family}Config")(**settings)


def published(name: str, **changes: Any) -> Any:
    """Return the transformers config of a model in PUBLISHED."""
    return config_of(**PUBLISHED[name] | changes)


def random_model(folder: Path, family: str, seed: int, **settings: Any) -> Path:
    """Write a random causal model of a family, with the tokenizer of the model `tiny`, and return its folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = config_of(family, vocab_size=47, bos_token_id=1, eos_token_id=2, **settings)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def random_published(folder: Path, name: str, device: str = "cpu", **changes: Any) -> Path:
    """Write a random bfloat16 model with the sizes of a model in PUBLISHED, and return its folder.

    device: where the weights are made; a GPU makes them faster. The tokenizer is that of the model `tiny`, whose end of
    text is token 2.
    """
    import torch
    import transformers

    sizes = PUBLISHED[name] | changes
    config = config_of(**sizes, dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{sizes['family']}ForCausalLM")(config)
    model.bfloat16().save_pretrained(folder)
    if device != "cpu":
        del model
        torch.cuda.empty_cache()
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


TINY_RANDOM: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    initializer_range=0.15,
)
"""Sizes of random models that every engine supports on a CPU. Large weights make token probabilities differ."""


def tiny_dense(folder: Path) -> Path:
    """Write a random dense Qwen3 with three layers and return its folder."""
    return random_model(folder, "Qwen3", seed=0, **TINY_RANDOM)


def tiny_mixture(folder: Path, dense: tuple[int, ...] = (1,)) -> Path:
    """Write a random Qwen3 mixture of experts with three layers and return its folder.

    dense: indices of layers with a plain MLP in place of experts. SGLang 0.5.23 does not support such layers.
    """
    return random_model(
        folder,
        "Qwen3Moe",
        seed=0,
        moe_intermediate_size=64,
        mlp_only_layers=list(dense),
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **TINY_RANDOM,
    )


if __name__ == "__main__":
    made = tiny_mixture(Path(sys.argv[1]))
    (made / "reward.py").write_text(REWARD)
