"""`--policy.compile-layers`: the model is the same, few graphs serve all packs, and other layers are refused."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.policy.attention import packed
from spmdrl.policy.fsdp.layers import compile_layers, recompute
from spmdrl.policy.heads import PackedLM
from tests.unit.packs import run_pack


def numbers(model, lengths):
    """Returns logp without and with a graph, entropy, and all gradients of one pack."""
    lengths = torch.tensor(lengths)
    tokens = torch.randint(3, 40, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[torch.cumsum(lengths, 0) - lengths] = False
    with torch.no_grad():
        scored = run_pack(model, tokens, lengths, mask, 0.7)[0]
    logp, entropy = run_pack(model, tokens, lengths, mask, 0.7)
    (logp.sum() + entropy.sum()).backward()
    return [scored, logp, entropy, *(p.grad for p in model.parameters())]


@pytest.fixture
def fresh(monkeypatch):
    """Leaves nothing compiled, and attention as it was."""
    monkeypatch.setattr(packed, "ENTRIES", [packed.packed_attention])
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()
    packed.register()


def test_compiled_layers_are_the_same_model_with_one_break_at_each_attention(fresh):
    graphs = []
    for lengths in ([5, 13, 40, 2], [30, 31, 32], [64]):
        plain, other = (build_model(TINY, torch.float64, False, packed.register()) for _ in range(2))
        if not graphs:
            made = PackedLM(other, "padded")
            compile_layers(other, "aot_eager")
            recompute(other)
        made.zero_grad()
        for a, b in zip(numbers(PackedLM(plain, "padded"), lengths), numbers(made, lengths), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
        graphs.append(counters["stats"]["unique_graphs"])
    # One part before and one after the attention, with and without a graph; later packs compile nothing.
    assert graphs == graphs[:1] * 3 and graphs[0] <= 8
    assert all("torch.compiler.disable" in why for why in counters["graph_break"]), counters["graph_break"]


def test_models_that_cannot_be_compiled_are_refused():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: Any = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8, num_local_experts=2)
    with torch.device("meta"):
        mixture = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    with pytest.raises(ValueError, match=r"--policy.compile-layers: layers of mixtral have mlp.experts \(MixtralExp"):
        compile_layers(mixture)
    # monkeypatch would leave dynamo's config without this entry.
    off = torch._dynamo.config.patch(disable=True)
    with off, pytest.raises(ValueError, match="TORCH_COMPILE_DISABLE turns compilation off"):
        compile_layers(mixture)
