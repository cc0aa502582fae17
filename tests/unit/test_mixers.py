"""Recurrent layers, short convolutions, attention sinks and moving rotary frequencies over packs and trees.

The reference is each sequence alone through plain transformers, in value and gradient.
"""

import sys
import types
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.packing import Packing, over
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.policy.attention.varlen import KERNELS, Needs, pick
from spmdrl.policy.fsdp.layers import recompute
from spmdrl.policy.heads import PackedLM
from spmdrl.policy.mixers.layers import CARRIERS, OTHERS, rows_of
from tests.unit.packs import run_pack
from tests.unit.test_packed_forward import gradient, plainly, scalar
from tests.unit.varlen_kernels import calls, stand_in

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = LINEAR | {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3_next": ("Qwen3NextConfig", DELTA | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "kimi_linear": (
        "KimiLinearConfig",
        LINEAR
        | {
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "falcon_h1": ("FalconH1Config", MAMBA2 | {"mamba_d_ssm": 64}),
    "bamba": ("BambaConfig", MAMBA2 | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        MAMBA2 | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M*M-",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
    "zamba2": (
        "Zamba2Config",
        {
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_key_value_heads": 4,
            "adapter_rank": 4,
        },
    ),
    "lfm2": ("Lfm2Config", CONV),
    "lfm2_moe": ("Lfm2MoeConfig", CONV | EXPERTS | {"num_dense_layers": 1}),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4, "time_step_rank": 4, "num_hidden_layers": 2}),
    "minimax": ("MiniMaxConfig", LINEAR | {"block_size": 8, "num_local_experts": 4, "head_dim": 8}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention", "recurrent"],
            "head_dim": 8,
        },
    ),
}
GPT_OSS = {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
LONG = 16
"""Tokens up to which longrope takes its short factors."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 5.0, 9.0, 14.0],
    "original_max_position_embeddings": LONG,
}
ATTENDING: dict[str, tuple[str, dict]] = {
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "phi3 longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": LONG, "max_position_embeddings": 64},
    ),
    "llama dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": LONG,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}
TEMPERATURE = 0.7


class Doubles(types.ModuleType):
    """torch with float64 in float32's place."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def in_float64(model):
    """Computes in float64 what a family's own code computes in float32 whatever the model's type."""
    names = {type(m).__module__ for m in model.modules()}
    modules = [sys.modules[name] for name in names if name.startswith("transformers.models")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for module in modules:
            patch.setattr(module, "torch", Doubles("torch"))
        yield


def pair(family: str, dtype=torch.float64):
    """Makes the same weights as plain transformers and as our packed model, its attention registered."""
    name, changes = (FAMILIES | ATTENDING)[family]
    if (config_class := getattr(transformers, name, None)) is None:
        pytest.skip(f"this transformers has no {name}")
    config = SMALL | changes
    experts = {"experts_implementation": "eager"} if any("experts" in key for key in config) else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, packed = (
            AutoModelForCausalLM.from_config(config_class(**config), attn_implementation=kind, **experts).to(dtype)
            for kind in ("eager", attention.register())
        )
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(torch.randn_like(p) * 0.05)
    packed.load_state_dict(plain.state_dict())
    for model in (plain, packed):
        # In a pack the padding token is an ordinary one.
        model.get_input_embeddings().padding_idx = None
    return plain.eval(), packed.eval()


def samples(*groups: tuple[int, tuple[int, ...]]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Makes tokens [T], lengths and mask [T] of groups: a prompt's length and those of its replies."""
    g = torch.Generator().manual_seed(1)
    rows, masks = [], []
    for length, replies in groups:
        prompt = torch.randint(61, (length,), generator=g)
        for reply in replies:
            rows.append(torch.cat([prompt, torch.randint(61, (reply,), generator=g)]))
            masks.append(torch.arange(length + reply) >= length)
    return torch.cat(rows), [len(row) for row in rows], torch.cat(masks)


GROUPS = (9, (5, 22, 1)), (1, (3, 7)), (12, (2, 9)), (6, (4,))
"""A prompt of one token and a reply of one among them."""


def assert_alone(plain, packed, model, tokens, lengths, mask, limit: float, tight: float) -> None:
    """Compares a pack with each of its sequences alone: logp, entropy and gradient."""
    want = plainly(plain, tokens, lengths, mask)
    want_gradient = gradient(plain, scalar(*want))
    got = run_pack(model, tokens, torch.tensor(lengths), mask, TEMPERATURE)
    for a, b in zip(want, got, strict=True):
        assert (a - b).abs().max() < limit, (a - b).abs().max()
    got_gradient = gradient(packed, scalar(*got))
    assert got_gradient.keys() == want_gradient.keys()
    for name, a in want_gradient.items():
        error = (a - got_gradient[name]).abs().max() / max(a.abs().max().item(), 1e-2)
        assert error < tight, (name, error)
    assert want[0].abs().max() > 0.5  # random weights that say something


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_packs_and_trees_are_each_sequence_alone(family):
    plain, packed = pair(family)
    # Griffin's own gradient of a square root is in float32.
    tight = 1e-6 if family == "recurrent_gemma" else 1e-9
    with in_float64(plain):
        for share in (False, True):
            assert_alone(plain, packed, PackedLM(packed, share=share), *samples(*GROUPS), 1e-9, tight)


@pytest.mark.parametrize("kind", ["auto", "eager", *KERNELS])
def test_layout_attention_sinks_are_those_of_each_sequence_alone(kind, monkeypatch):
    """Layers without a window take the kernels, by stand-ins; those with one are padded rows."""
    plain, packed = pair("gpt_oss")
    if kind in KERNELS:
        stand_in(monkeypatch)
        monkeypatch.setattr(attention, "installed", lambda: frozenset({kind}))
    with in_float64(plain):
        for share in (False, True):
            model = PackedLM(packed, "eager" if kind == "eager" else "auto", share=share)
            assert_alone(plain, packed, model, *samples(*GROUPS), 1e-9, 1e-9)
            assert calls == ([kind] * 2 if kind in KERNELS else [])
            calls.clear()


def test_a_window_would_hide_a_sink_from_kernels():
    needs = Needs(9, torch.bfloat16, 72, sink_and_window=True)
    assert pick("auto", needs, frozenset(KERNELS)) == "padded"
    with pytest.raises(ValueError, match="flash: its window would hide the attention sink"):
        pick("flash", needs, frozenset(KERNELS))


def forget(rotary, _):
    """Undoes what transformers keeps from one forward to the next: frequencies that grew."""
    rotary.max_seq_len_cached, rotary.inv_freq = rotary.original_max_seq_len, rotary.original_inv_freq


@pytest.mark.parametrize("family", ["phi3 longrope", "llama dynamic"])
def test_layout_rotary_frequencies_are_those_of_each_sequence_alone(family):
    """Sequences on both sides of the original length, in one pack, twice and in both orders: nothing is kept."""
    plain, packed = pair(family)
    for module in plain.modules():
        if hasattr(module, "max_seq_len_cached"):
            module.register_forward_pre_hook(forget)
    groups = [(5, (3, 4)), (9, (5, 22)), (4, (12, 12)), (12, (25, 30))]
    with in_float64(plain):
        for order in (groups, groups[::-1], groups[:1], groups[2:3]):
            for share in (False, True):
                assert_alone(plain, packed, PackedLM(packed, share=share), *samples(*order), 1e-9, 1e-9)


def test_sequences_share_tokens_where_all_have_the_same_frequencies(monkeypatch):
    rows = []
    _, packed = pair("phi3 longrope", torch.float32)
    packed.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for replies, shared in (((2, 3), True), ((2, 30), False), ((28, 30), True)):
        tokens, lengths, mask = samples((9, replies))
        run_pack(PackedLM(packed, share=True), tokens, torch.tensor(lengths), mask, 1.0)
        assert rows.pop() == len(tokens) - 9 * shared


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_layout_recomputation_in_the_backward_finds_its_own_pack(family):
    """Another pack runs before the backward, whose borders must not be taken."""
    _, packed = pair(family, torch.float32)
    model = PackedLM(packed, share=True)
    tokens, lengths, mask = samples(*GROUPS)
    seen = []
    for again in (False, True):
        if again:
            recompute(packed)
        logp, entropy = run_pack(model, tokens, torch.tensor(lengths), mask, 1.0)
        with torch.no_grad():
            run_pack(model, tokens[:20], torch.tensor([13, 7]), mask[:20], 1.0)
        seen.append(gradient(packed, scalar(logp, entropy)))
    assert all(torch.allclose(seen[0][n], seen[1][n], rtol=1e-5, atol=1e-6) for n in seen[0])


def test_rows_of_a_tree_read_each_token_once_and_hand_states_over():
    # 0: trunk of 4; 1: one token behind it, which two leaves follow; 2: a trunk behind the trunk; 3-6: leaves.
    lengths, parents = [4, 1, 3, 2, 5, 1, 2], [-1, 0, 0, 1, 1, 2, 2]
    packing = Packing(lengths, parents, torch.device("cpu"), "auto", TokenSlice(sum(lengths)))
    for hand in (True, False):
        rows = rows_of(packing, hand)
        read = torch.cat([c.tokens for c in rows.classes])
        assert torch.equal(read.sort().values, torch.arange(18)) and torch.equal(read[rows.order], torch.arange(18))
        assert rows is rows_of(packing, hand)
    handing, behind, leaves, last = rows_of(packing, True).classes
    assert handing.hands and handing.gather.tolist() == [0, 1, 2, 3] and handing.starts is None
    assert behind.starts is not None and leaves.starts is not None and last.starts is not None
    assert behind.hands and behind.gather.tolist() == [5, 6, 7] and behind.starts.tolist() == [0]
    # A single token is no trunk: it stands before both of its leaves, and is read once.
    assert leaves.sequences == 2 and leaves.gather.view(2, -1)[:, 0].tolist() == [4, 4]
    assert leaves.starts.tolist() == [0, 0] and leaves.tokens.tolist().count(4) == 1
    assert last.starts.tolist() == [1, 1] and not last.hands
    (whole,) = rows_of(packing, False).classes
    assert whole.sequences == 4 and whole.starts is None and not whole.hands


def test_layers_that_carry_a_state_need_whole_sequences():
    _, packed = pair("lfm2", torch.float32)
    model = PackedLM(packed)
    tokens, lengths, mask = samples(*GROUPS)
    part = TokenSlice(len(tokens))
    part.ranks = 2
    for sequences in (lengths, [len(tokens)]):
        packing = Packing(sequences, [-1] * len(sequences), torch.device("cpu"), "auto", part)
        with over(packing), pytest.raises(ValueError, match="--parallel.sp 2: Lfm2ShortConv passes a state"):
            model.hf.base_model(input_ids=tokens[None], packing=packing)


def test_a_family_that_keeps_its_residual_in_float32_has_its_head_in_its_own_type():
    plain, packed = pair("mamba2", torch.bfloat16)
    tokens, lengths, mask = samples(*GROUPS)
    with torch.no_grad():
        want, got = (
            plainly(plain, tokens, lengths, mask)[0],
            run_pack(PackedLM(packed), tokens, torch.tensor(lengths), mask, 0.7)[0],
        )
    assert (want - got).abs().median() < 0.03


def test_each_name_of_a_layer_is_one_of_transformers():
    named = {type(m).__name__ for family in FAMILIES for m in pair(family, torch.float32)[0].modules()}
    assert all(any(name.endswith(end) for name in named) for end in (*CARRIERS, *OTHERS))
