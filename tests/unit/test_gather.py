"""`--policy.gather auto`: its limits, and the size of a model that it compares with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.config.backends import way_to_gather
from spmdrl.config.schema import Config
from spmdrl.policy.fsdp import sharding

GIB = 1 << 30


def test_the_way_to_gather_follows_the_size_unless_it_is_given():
    sizes = {2 * GIB: "whole", 2 * GIB + 1: "once", 8 * GIB: "once", 8 * GIB + 1: "layers"}
    assert {size: way_to_gather("auto", size) for size in sizes} == sizes
    assert [way_to_gather(way, 3 * GIB) for way in ("whole", "once", "layers")] == ["whole", "once", "layers"]


@pytest.mark.parametrize("tied", [True, False])
def test_all_experts_count_and_a_tied_weight_once(tied, monkeypatch):
    from transformers import MixtralConfig, MixtralForCausalLM

    width, vocab, experts = 16, 32, 4
    sizes: Any = dict(hidden_size=width, intermediate_size=width, num_hidden_layers=1, num_local_experts=experts)
    heads: Any = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    with torch.device("meta"):
        hf = MixtralForCausalLM(MixtralConfig(**sizes, **heads, vocab_size=vocab, tie_word_embeddings=tied))
    seen = []
    monkeypatch.setattr(sharding, "way_to_gather", lambda choice, size: seen.append((choice, size)) or "whole")
    monkeypatch.setattr(sharding, "_shard", lambda *args: None)
    world: Any = SimpleNamespace(sp_group=None)
    sharding.sharded(hf, Config(), world, "lm", torch.bfloat16, False, lambda name: False)
    layer = 4 * width**2 + experts * 3 * width**2 + experts * width + 2 * width
    assert seen == [("auto", 2 * (layer + width + vocab * width * (1 if tied else 2)))]
