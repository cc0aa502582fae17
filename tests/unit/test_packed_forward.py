"""Law 2 inside a micro-batch: the packed forward is one plain Hugging Face forward a sequence, family by family."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.varlen import Needs, pick
from spmdrl.policy.fsdp.layers import recompute
from spmdrl.policy.heads import PackedLM
from tests.ranks.cases import float64_softmax
from tests.unit.packs import run_pack
from tests.unit.varlen_kernels import calls, stand_in

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = 6
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2 sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "llama": ("LlamaConfig", {}),
    "llama rope scaling": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral sliding": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW, "original_max_position_embeddings": 128}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 5}),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
}
FLOAT32_NORMS = ("gemma2", "gemma3", "cohere")
"""Families whose norms multiply by their weight in float32, so that its gradient is a float32 sum over tokens."""
LENGTHS = {"equal": [9, 9, 9, 9], "very uneven": [2, 40, 3, 17, 5, 2], "one token": [1, 30, 2], "alone": [21]}
TEMPERATURE = 0.7


def pair(family: str, dtype=torch.float64):
    """Makes the same weights as plain Hugging Face (eager) and as our packed model, its attention registered."""
    name, changes = FAMILIES[family]
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if "moe" in family or "mixtral" in family else {}  # no float64 kernel
    plain = AutoModelForCausalLM.from_config(config_class(**SMALL | changes), attn_implementation="eager", **options)
    plain = plain.to(dtype)
    with torch.no_grad():
        for p in plain.parameters():  # norms and biases too, which start at 1 and 0
            p.add_(torch.randn_like(p) * 0.05)
    torch.set_rng_state(state)
    config = config_class(**SMALL | changes)
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register(), **options).to(dtype)
    packed.load_state_dict(plain.state_dict())
    return plain.eval(), packed.eval()


def tokens_of(lengths):
    g = torch.Generator().manual_seed(sum(lengths))
    mask = torch.rand(sum(lengths), generator=g) < 0.8
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    mask[starts] = False
    return torch.randint(0, 61, (sum(lengths),), generator=g), mask


def plainly(model, tokens, lengths, mask):
    """Returns logp and entropy [T] from one forward for each sequence and log_softmax over whole logits."""
    logp, entropy = [], []
    for part, keep in zip(tokens.split(lengths), mask.split(lengths), strict=True):
        log_p = torch.log_softmax(model(input_ids=part[None], use_cache=False).logits[0, :-1] / TEMPERATURE, -1)
        first = log_p.new_zeros(1)
        chosen = log_p.gather(1, part[1:, None])[:, 0]
        logp.append(torch.where(keep, torch.cat([first, chosen]), 0.0))
        entropy.append(torch.where(keep, torch.cat([first, -(log_p.exp() * log_p).sum(-1)]), 0.0))
    return torch.cat(logp), torch.cat(entropy)


def gradient(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def scalar(logp, entropy):
    weight = torch.linspace(-1, 2, len(logp), dtype=logp.dtype)
    return (weight * logp).sum() + (weight.flip(0) * entropy).sum()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_packed_forward_is_plain_hugging_face(family, monkeypatch):
    plain, packed = pair(family)
    # Stand-ins replace kernels of a GPU; torch's own cannot cap scores.
    kernels = ("flash",) if family == "gemma2" else ("flash", "varlen")
    ours = PackedLM(packed)
    calls.clear()
    for case, lengths in LENGTHS.items():
        tokens, mask = tokens_of(lengths)
        if not mask.any():
            mask[1] = True
        with float64_softmax():
            want = plainly(plain, tokens, lengths, mask)
            want_gradient = gradient(plain, scalar(*want))
        for kind in ("auto", "eager", *kernels):
            ours.attention = kind
            with monkeypatch.context() as patch:
                if kind in kernels:
                    stand_in(patch)
                got = run_pack(ours, tokens, torch.tensor(lengths), mask, TEMPERATURE)
                assert set(calls) == ({kind} & set(kernels)) and len(calls) in (0, SMALL["num_hidden_layers"])
                calls.clear()
            for a, b in zip(want, got, strict=True):
                assert (a - b).abs().max() < 1e-10, (case, kind, (a - b).abs().max())
                assert (b[~mask] == 0).all()
            got_gradient = gradient(packed, scalar(*got))
            assert got_gradient.keys() == want_gradient.keys()
            for name, a in want_gradient.items():
                error = (a - got_gradient[name]).abs().max() / max(a.abs().max().item(), 1e-2)
                exact = 1e-6 if family in FLOAT32_NORMS and "norm" in name else 1e-9
                assert error < exact, (case, kind, name, error)
    assert want[0].abs().max() > 0.5  # random weights that say something


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama"])
def test_layout_activation_checkpointing_changes_nothing(family):
    _, packed = pair(family)
    ours = PackedLM(packed)
    tokens, mask = tokens_of(LENGTHS["very uneven"])
    lengths = torch.tensor(LENGTHS["very uneven"])
    off = run_pack(ours, tokens, lengths, mask, 1.0)
    want = gradient(packed, scalar(*off))
    calls = []
    packed.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute(packed)
    on = run_pack(ours, tokens, lengths, mask, 1.0)
    got = gradient(packed, scalar(*on))
    assert len(calls) == 2  # it did run twice
    assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
    assert all(torch.allclose(want[n], got[n], rtol=1e-12, atol=1e-14) for n in want)


def test_layout_windows_and_caps_are_not_decoration():
    """The cases above detect them: without the window or the cap the numbers are others."""
    tokens, mask = tokens_of([30, 12])
    lengths = torch.tensor([30, 12])
    for family, key in (
        ("mistral sliding", "sliding_window"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
    ):
        _, packed = pair(family)
        base = run_pack(PackedLM(packed), tokens, lengths, mask, 1.0)[0].detach()
        setattr(packed.config, key, None)
        for module in packed.modules():
            if hasattr(module, key):
                setattr(module, key, None)
        assert (run_pack(PackedLM(packed), tokens, lengths, mask, 1.0)[0] - base).abs().max() > 1e-3, (family, key)


def test_a_model_whose_attention_gets_no_packing_is_refused():
    config = transformers.StableLmConfig(**SMALL)
    stablelm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    with pytest.raises(ValueError, match="StableLmAttention gets no packing"):
        run_pack(PackedLM(stablelm), torch.zeros(4, dtype=torch.int64), torch.tensor([4]), torch.arange(4) > 0, 1.0)
    with pytest.raises(ValueError, match="flash-attn is not installed; use --policy.attention auto"):
        pick("flash", Needs(9, torch.float32, 8), frozenset())
