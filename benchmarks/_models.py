"""Small models for runs of a minute, made where they are needed: nothing is downloaded.

python -m benchmarks._models FOLDER    a mixture of experts in FOLDER, and FOLDER/reward.py for its random text
"""

import shutil
import sys
from pathlib import Path

TINY = Path(__file__).resolve().parents[1] / "spmdrl" / "assets" / "tiny"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return (2 * right - len(solution_str)) / len(ground_truth)
"""
"""Text of which no two pieces are alike gets marks that differ, however wrong it is."""


def tiny_mixture(folder: Path) -> Path:
    """A random Qwen3 of two layers with experts and a dense one between them, with the tokenizer of `tiny`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=47,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


if __name__ == "__main__":
    made = tiny_mixture(Path(sys.argv[1]))
    (made / "reward.py").write_text(REWARD)
