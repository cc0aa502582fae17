"""The paper engine's arithmetic, without an engine: `tests/engines/test_paper_engine.py` holds it against real ones."""

import copy
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from benchmarks._models import config_of, published
from spmdrl.config.schema import Config
from spmdrl.engines.hf.start import quantize
from spmdrl.plan.engine import PaperEngine
from spmdrl.plan.engine_boxes import EngineLayout
from spmdrl.plan.engine_bytes import Model, model_of
from spmdrl.weights.boxes import Entry, size

GIB = 1 << 30
SMALL = dict(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=8
)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
ROUTED = dict(EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1)
FAMILIES = {
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {},
    "Gemma2": {},
    "Phi3": {"tie_word_embeddings": False},
    "Glm4": {},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": dict(EXPERTS, num_experts=8, shared_expert_intermediate_size=64, decoder_sparse_step=1),
    "Qwen3Moe": dict(EXPERTS, num_experts=8),
    "DeepseekV3": ROUTED | LATENT,
    "Glm4Moe": dict(ROUTED, use_qk_norm=True),
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (8, 1, 1), (2, 1, 2), (8, 1, 8), (2, 2, 4), (1, 4, 4), (2, 2, 1)]
"""(tp, dp, ep). Eight ranks are more than the two heads of keys and values."""


def settings(**rollout) -> Config:
    """Settings in bfloat16; `dtype` and `lora_rank` are not the engine's own."""
    cfg = copy.deepcopy(Config())
    cfg.model.dtype = rollout.pop("dtype", "bfloat16")
    cfg.lora.rank = rollout.pop("lora_rank", 0)
    for name, value in ({"engine": "vllm"} | rollout).items():
        setattr(cfg.rollout, name, value)
    return cfg


def engine(cfg: Config, config, gpu: int | None = None, place: int = 0, model: Model | None = None) -> PaperEngine:
    return PaperEngine(cfg, SimpleNamespace(engine_tp_rank=place), config, gpu, model)


@pytest.fixture(scope="module")
def models() -> dict:
    """Config and tensors by family."""
    configs = {name: config_of(name, **SMALL | more) for name, more in FAMILIES.items()}
    return {name: (config, model_of(config)) for name, config in configs.items()}


@pytest.fixture(scope="module")
def deepseek() -> tuple:
    """The published 671B and its tensors."""
    config = published("DeepSeek-V3", max_position_embeddings=163840)
    return config, model_of(config)


# ── boxes ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_ranks_of_an_engine_cover_every_tensor_and_know_every_name(models, family, kind):
    config, model = models[family]
    for tp, dp, ep in LAYOUTS:
        layout = EngineLayout(kind, config, tp, dp, ep)
        for entry in model.entries:
            held = np.zeros(entry.shape, dtype=int)
            for place in range(tp * dp):
                cut = layout.cut(entry.name, entry.shape, place)
                assert cut.group != "unknown", entry.name
                for box in cut.boxes:
                    assert size(box) and all(0 <= a < b <= n for (a, b), n in zip(box, entry.shape, strict=True)), box
                    held[tuple(slice(*side) for side in box)] += 1
            assert held.min() >= 1, (entry.name, tp, dp, ep)
            # Each element is on one rank, on one of every copy, on those that share a head, or on all.
            copies = np.unique(held).tolist()
            assert all(tp * dp % n == 0 for n in copies), (entry.name, copies)
            assert len(copies) == 1 or "qkv_proj" in entry.name, (entry.name, copies)


@pytest.mark.parametrize("family", [name for name, more in FAMILIES.items() if "num_experts_per_tok" in more])
def test_experts_are_never_cut_under_ep_and_always_without(models, family):
    config, model = models[family]
    experts = [e for e in model.entries if ".experts." in e.name]
    for tp, dp in ((2, 1), (8, 1), (2, 2)):
        for place in range(tp * dp):
            whole = EngineLayout("vllm", config, tp, dp, tp * dp)
            found = [(e, box) for e in experts for box in whole.cut(e.name, e.shape, place).boxes]
            for entry, box in found:
                inner = box if entry.name.split(".experts.")[1][0].isdigit() else box[1:]
                shape = entry.shape[len(box) - len(inner) :]
                rows = sum(b - a for a, b in [inner[0]])
                assert all(a == 0 for a, _ in inner[1:]) and rows in (shape[0], shape[0] // 2), (entry.name, box)
            assert sum(size(box) for _, box in found) * tp * dp == sum(size(e.box) for e in experts)
            cut = EngineLayout("vllm", config, tp, dp, 1)
            assert not any(cut.cut(e.name, e.shape, place).boxes == [e.box] for e in experts if "bias" not in e.name)


@pytest.mark.parametrize(
    ("heads", "kv", "width", "tp", "kind", "fits"),
    [
        (14, 2, 4864, 7, "vllm", "1, 2"),
        (14, 2, 14 * 64, 7, "vllm", "1, 2, 14"),
        (16, 4, 1024, 3, "sglang", "1, 2, 4, 8, 16"),
        (8, 8, 1000, 16, "vllm", "1, 2, 4, 8"),
    ],
)
def test_sizes_that_divide_a_model_are_named_all(heads, kv, width, tp, kind, fits):
    """Multiples of the key-value heads, which engines copy, are among them where they divide the other heads."""
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=width)
    with pytest.raises(ValueError, match=f"^--rollout.tp {tp}: the model has {heads} .*; {kind} takes {fits}$"):
        EngineLayout(kind, config, tp).check()
    for fit in map(int, fits.split(", ")):
        EngineLayout(kind, config, fit).check()


def test_fused_layers_are_cut_as_their_parts():
    """[q; k; v] and [gate; up] in one tensor give the rows that the separate tensors give."""
    config = config_of("Llama", **SMALL)
    for tp in (1, 2, 4, 8):
        for place in range(tp):
            layout = EngineLayout("vllm", config, tp)

            def rows(name, *shape, layout=layout, place=place):
                return [box[0] for box in layout.cut(f"model.layers.0.{name}.weight", shape, place).boxes]

            parts = [(0, "self_attn.q_proj", 128), (128, "self_attn.k_proj", 32), (160, "self_attn.v_proj", 32)]
            apart = [(at + a, at + b) for at, name, n in parts for a, b in rows(name, n, 64)]
            assert rows("self_attn.qkv_proj", 192, 64) == apart
            parts = [(0, "mlp.gate_proj", 96), (96, "mlp.up_proj", 96)]
            assert rows("mlp.gate_up_proj", 192, 64) == [
                (at + a, at + b) for at, n, w in parts for a, b in rows(n, w, 64)
            ]


def test_packed_experts_are_cut_as_their_parts():
    config = config_of("Qwen3Moe", **SMALL | FAMILIES["Qwen3Moe"])
    for tp, ep in ((2, 1), (2, 2), (8, 8), (3, 3)):
        for place in range(tp):
            layout = EngineLayout("vllm", config, tp, 1, ep)
            packed, apart = np.zeros((8, 64, 64), bool), np.zeros((8, 64, 64), bool)
            for box in layout.cut("model.layers.0.mlp.experts.gate_up_proj", packed.shape, place).boxes:
                packed[tuple(slice(*side) for side in box)] = True
            for i in range(8):
                for at, name in ((0, "gate_proj"), (32, "up_proj")):
                    for a, b in (
                        box[0]
                        for box in layout.cut(f"model.layers.0.mlp.experts.{i}.{name}.weight", (32, 64), place).boxes
                    ):
                        apart[i, at + a : at + b] = True
            assert (packed == apart).all() and packed.any()


def test_vocabulary_is_padded_to_64_rows_before_it_is_divided():
    layout = EngineLayout("vllm", config_of("Llama", **SMALL), 4)
    cuts = [layout.cut("model.embed_tokens.weight", (130, 64), place).boxes for place in range(4)]
    assert cuts == [[((0, 48), (0, 64))], [((48, 96), (0, 64))], [((96, 130), (0, 64))], []]
    assert layout.vocab_rows("embed_tokens", 130) == 48
    assert EngineLayout("sglang", config_of("Llama", **SMALL), 3).vocab_rows("embed_tokens", 130) == 64


def test_names_beyond_the_rules_are_whole_and_named():
    config = config_of("Llama", **SMALL)
    model = Model([Entry("model.layers.0.self_attn.strange.weight", (8, 8)), Entry("vision.block.weight", (4, 4))])
    found = engine(settings(tp=2), config, model=model)
    assert found.unknown == [entry.name for entry in model.entries] and found.weight_bytes == 2 * (64 + 16)
    assert found.needs(model.entries).boxes == [(0, model.entries[0].box), (1, model.entries[1].box)]


@pytest.mark.slow
def test_layers_that_predict_further_tokens_are_passed_over(deepseek):
    layout = EngineLayout("vllm", deepseek[0], 8)
    assert layout.cut("model.layers.60.self_attn.o_proj.weight", (7168, 16384), 1).boxes == [((0, 7168), (2048, 4096))]
    assert layout.cut("model.layers.61.self_attn.o_proj.weight", (7168, 16384), 1).boxes == []


# ── weights ──────────────────────────────────────────────────────────────────


def shares(model: Model) -> Counter:
    """Elements of DeepSeek-V3 by what divides them: attention by heads, the dense first layers and the head, ..."""
    kinds = {
        "experts": {"experts"},
        "shared": {"shared_experts"},
        "heads": {"q_b_proj", "kv_b_proj", "o_proj", "embed_tokens"},
        "dense": {"gate_proj", "up_proj", "down_proj"},
        "head": {"lm_head"},
    }
    out = Counter()
    for entry in model.entries:
        parts = set(entry.name.split("."))
        out[next((kind for kind, names in kinds.items() if names & parts), "whole")] += size(entry.box)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp", "ep"), [(32, 1, 1), (64, 1, 64), (8, 8, 64), (1, 64, 64)])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_deepseek_v3_weighs_its_tensors_divided_by_their_axes(deepseek, kind, tp, dp, ep):
    config, model = deepseek
    count = shares(model)
    assert count.total() == pytest.approx(671e9, rel=0.001) and count["experts"] > 650e9
    # SGLang divides dense layers, shared experts and the head over the ranks of all copies of the attention. Where
    # vLLM's copies have several ranks, each rank has tokens of its own and so the shared experts whole.
    ranks = tp * dp
    beside = ranks if kind == "sglang" else tp
    shared = 1 if kind == "vllm" and tp > 1 and dp > 1 else beside
    ideal = count["experts"] / ranks + count["heads"] / tp + (count["dense"] + count["head"]) / beside
    ideal = 2 * (ideal + count["shared"] / shared + count["whole"])
    for place in (0, ranks - 1):
        cfg = settings(engine=kind, tp=tp, dp=dp, ep=ep)
        found = engine(cfg, config, 80 * GIB, place, model)
        assert found.weight_bytes == pytest.approx(ideal, rel=0.01)
        assert found.bytes_by_owner()["engine weights"] == found.weight_bytes and found.unknown == []


def test_fp8_in_vllm_halves_the_weights_and_reads_whole_tensors(deepseek):
    config, model = deepseek
    plain, rounded = (
        engine(settings(tp=32, quantization=kind), config, 80 * GIB, 0, model) for kind in ("none", "fp8")
    )
    # What is not rounded: embedding, head, norms, routers, and the unrounded copies of kv_b_proj.
    assert 0.5 < rounded.weight_bytes / plain.weight_bytes < 0.55
    assert rounded.needs(model.entries).boxes == [(i, entry.box) for i, entry in enumerate(model.entries)]


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "idefics3"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_hf_engine_rounds_what_its_own_code_rounds(kind, family):
    from transformers import LlamaForCausalLM

    from tests.unit import vision_models

    config = config_of("Llama", **SMALL) if family == "llama" else vision_models.config(family)
    hf = LlamaForCausalLM(config) if family == "llama" else vision_models.tiny(family)
    quantize(hf, kind)
    real = sum(p.nbytes for p in hf.parameters())
    assert engine(settings(engine="hf", quantization=kind, dtype="float32"), config).weight_bytes == real


# ── KV cache and workspace ───────────────────────────────────────────────────


def test_cache_on_a_gpu_is_what_its_share_leaves(deepseek):
    config, model = deepseek
    lengths = {"max_prompt_tokens": 1000, "max_new_tokens": 31000}
    cfg = settings(tp=32, gpu_memory_utilization=0.9, **lengths)
    found = engine(cfg, config, 80 * GIB, 0, model)
    # Latent rows: 61 layers x (512 + 64) numbers of 2 bytes, whatever the heads.
    block = 64 * 61 * 576 * 2
    room = int(0.9 * 80 * GIB) - found.weight_bytes - found.workspace_bytes
    assert found.cache_bytes == room // block * block and found.lack == 0
    assert found.cache_tokens == found.cache_bytes // block * 64 - 64
    assert found.sequences == (found.cache_bytes // block - 1) // 500 > 5
    assert found.workspace_bytes == sum(found.workspace.values()) > GIB
    # SGLang's share does not hold the workspace.
    other = engine(settings(tp=32, engine="sglang", gpu_memory_utilization=0.9, **lengths), config, 80 * GIB, 0, model)
    assert other.cache_bytes > found.cache_bytes + GIB


def test_lack_is_the_bytes_that_one_sequence_misses(deepseek):
    config, model = deepseek
    lengths = {"max_prompt_tokens": 1000, "max_new_tokens": 31000, "gpu_memory_utilization": 0.9}
    found = engine(settings(tp=16, **lengths), config, 80 * GIB, 0, model)
    assert found.lack > 0 and found.sequences == found.cache_tokens == found.cache_bytes == 0
    enough = 80 * GIB + int(found.lack / 0.9) + 2
    assert engine(settings(tp=16, **lengths), config, enough, 0, model).sequences == 1
    assert engine(settings(tp=16, **lengths), config, enough - 64, 0, model).lack in range(1, 64)


def test_given_cache_is_rounded_to_blocks():
    config = config_of("Llama", **SMALL)
    model = model_of(config)
    lengths = {"max_prompt_tokens": 100, "max_new_tokens": 100}
    # 2 layers x keys and values of 2 heads of 16 numbers, in blocks of 16 tokens.
    block = 16 * 2 * 2 * 2 * 16 * 2
    found = engine(settings(kv_cache_gib=0.001, **lengths), config, 8 * GIB, 0, model)
    assert found.cache_bytes == int(0.001 * GIB) // block * block and found.lack == 0
    assert found.sequences == (found.cache_bytes // block - 1) // 13
    # What does not fit the GPU shows in the sum of the rollout, not in the cache.
    found = engine(settings(kv_cache_gib=8.0, **lengths), config, 8 * GIB, 0, model)
    assert found.lack == 0 and found.cache_bytes + found.weight_bytes + found.workspace_bytes > 8 * GIB
    # One sequence and vLLM's spare block.
    small = engine(settings(kv_cache_gib=5 * block / GIB, **lengths), config, 8 * GIB, 0, model)
    assert small.sequences == 0 and small.lack == 9 * block


def test_heads_that_more_ranks_share_are_cached_by_each():
    config = config_of("Llama", **SMALL)
    model = model_of(config)
    for tp, heads in ((1, 2), (2, 1), (8, 1)):
        found = engine(settings(tp=tp, max_sequences=3), config, None, tp - 1, model)
        assert found.cache_bytes // (found.cache_tokens + 32) == 2 * 2 * heads * 16 * 2


def test_hf_cache_grows_and_holds_the_keys_of_every_head():
    config = config_of("DeepseekV3", **SMALL | FAMILIES["DeepseekV3"])
    found = engine(settings(engine="hf", max_sequences=4, max_prompt_tokens=20, max_new_tokens=20), config)
    assert found.grows and found.cache_bytes == 4 * 40 * 2 * 8 * (16 + 8 + 16) * 2
    assert found.bytes_by_owner()["KV cache"] == 0 and found.workspace == {}


# ── the contract ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "gpu", "level", "left", "version"),
    [
        ("vllm", None, 1, "weights", 3),
        ("vllm", None, 2, "", None),
        ("vllm", 8 * GIB, 1, "", 3),
        ("vllm", 8 * GIB, 2, "", None),
        ("vllm", 8 * GIB, 0, "all", 3),
        ("sglang", None, 1, "weights", 3),
        ("sglang", 8 * GIB, 1, "", None),
        ("hf", None, 1, "weights", 3),
        ("hf", 8 * GIB, 1, "", 3),
        ("hf", 8 * GIB, 2, "", None),
    ],
)
def test_sleep_frees_what_the_real_engine_frees(kind, gpu, level, left, version):
    config = config_of("Llama", **SMALL)
    found = engine(settings(engine=kind), config, gpu)
    awake = found.bytes_by_owner()
    assert awake["engine weights"] == found.weight_bytes and (awake["KV cache"] > 0) is (kind != "hf")
    found.load([], 3)
    found.sleep(level)
    held = found.bytes_by_owner()
    assert held["engine weights"] == (found.weight_bytes if left else 0)
    assert held["KV cache"] == (awake["KV cache"] if left == "all" else 0) and found.version == version
    found.wake("weights")
    found.wake("kv_cache")
    assert found.bytes_by_owner() == awake
    found.close()
    assert found.version is None and found.bytes_by_owner() == {"engine weights": 0, "KV cache": 0}


def test_load_takes_buckets_one_by_one_and_keeps_none():
    """While the next bucket is filled the last one is alive, as in the loops of the real engines."""
    found = engine(settings(), config_of("Llama", **SMALL))
    alive: list[weakref.ref] = []

    def buckets():
        for _ in range(3):
            assert found.version is None and all(ref() is None for ref in alive[:-1])
            tensor = torch.empty(4, device="meta")
            alive.append(weakref.ref(tensor))
            yield {"x": tensor}
            del tensor

    found.load(buckets(), 7)
    assert found.version == 7 and all(ref() is None for ref in alive) and len(alive) == 3
