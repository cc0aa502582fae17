"""Megatron policies: an update is the one that FSDP makes, on every layout; what is saved goes on elsewhere."""

import shutil

import pytest
import torch

from spmdrl.policy.load import TINY
from tests.ranks.cases import small_model
from tests.ranks.harness import run_ranks
from tests.ranks.megatron_cases import loads, parked, saves, updates

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

# Adam divides by what may be rounding, unless epsilon is above it.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "clip_grad_norm": 0.5}
TWICE = {"updates_per_step": 2}
PRESETS = {
    "grpo": {"algo": {"preset": "grpo", "kl_coef": 0.05, "entropy_coef": 0.01} | TWICE},
    "ppo": {"algo": {"preset": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"} | TWICE},
    "gspo": {"algo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1} | TWICE},
    "kl_cov": {"algo": {"preset": "kl_cov", "cov_ratio": 0.2, "cov_kl_coef": 0.7} | TWICE},
}
DENSE = {
    1: {"tp1": {}},
    2: {
        "dp2": {},
        "tp2": {"tp": 2, "sequence_parallel": False},
        "tp2+sp": {"tp": 2},
        "pp2": {"pp": 2},
        "cp2": {"cp": 2},
    },
    4: {"tp2 pp2": {"tp": 2, "pp": 2}},
}
MIXTURE = {2: {"ep2": {"ep": 2}}, 4: {"tp2 ep2": {"tp": 2, "ep": 2}}}
DEEP = {2: {"pp2 vpp2": {"pp": 2, "virtual_stages": 2}}}
CASES = [("dense", preset, n, s) for preset in PRESETS for n, on in DENSE.items() for s in on]
CASES += [("mixture", preset, n, s) for preset in ("grpo", "ppo") for n, on in MIXTURE.items() for s in on]
CASES += [("deep", preset, n, s) for preset in ("grpo", "ppo") for n, on in DEEP.items() for s in on]
AXES = {
    (kind, s): axes
    for kind, layouts in (("dense", DENSE), ("mixture", MIXTURE), ("deep", DEEP))
    for on in layouts.values()
    for s, axes in on.items()
}
MOVES = {
    "tp2 to tp1": ("dense", {"tp": 2}, {}),
    "pp2 to pp1": ("dense", {"pp": 2}, {}),
    "ep2 to ep1": ("mixture", {"ep": 2}, {}),
}
METRICS = ("loss", "entropy/mean", "grad_norm")


def sections(preset: str) -> dict:
    # Several micro-batches on every layout.
    return {**PRESETS[preset], "optimizer": OPTIMIZER, "policy": {"max_tokens_per_microbatch": 64}}


def mixture(folder, seed: int) -> str:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=47,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind of model -> part -> folder; the critic beside a mixture is dense."""
    root = tmp_path_factory.mktemp("models")
    critic = small_model(root / "critic", 2, True)
    out = {}
    for kind, layers in (("dense", 2), ("deep", 4)):
        parts = {
            n: small_model(root / f"{kind}_{n}", i, num_hidden_layers=layers)
            for i, n in enumerate(("policy", "reference"))
        }
        own = small_model(root / f"{kind}_critic", 2, True, num_hidden_layers=layers)
        out[kind] = parts | {"critic": own}
    out["mixture"] = {n: mixture(root / f"mixture_{n}", i) for i, n in enumerate(("policy", "reference"))}
    out["mixture"]["critic"] = critic
    for folder in root.iterdir():
        # Saving asks for one.
        shutil.copy(TINY / "tokenizer.json", folder)
    return out


@pytest.fixture(scope="module")
def by_fsdp(folders):
    """(kind, preset) -> (metrics, weights)."""
    pairs = sorted({case[:2] for case in CASES})
    return run_ranks(updates, 1, [((k, p), {}, sections(p), folders[k]) for k, p in pairs], "fsdp")[0]


@pytest.fixture(scope="module")
def by_megatron(folders):
    """Case -> what every rank has."""
    out = {}
    for n in (1, 2, 4):
        cases = [(c, AXES[c[0], c[3]], sections(c[1]), folders[c[0]]) for c in CASES if c[2] == n]
        for rank in run_ranks(updates, n, cases, "megatron"):
            for key, value in rank.items():
                out.setdefault(key, []).append(value)
    return out


def worst(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_parity_with_fsdp(case, by_fsdp, by_megatron):
    want, weights = by_fsdp[case[:2]]
    results = by_megatron[case]
    names = [m for m in want if m.removeprefix("critic/") in METRICS or m in ("kl/mean", "clip_fraction")]
    for metrics, _ in results:
        for name in names:
            assert abs(metrics[name] - want[name]) <= 1e-5 * max(abs(want[name]), 1e-2), (
                name,
                metrics[name],
                want[name],
            )
    moved = worst(results[0][1], weights)
    print(case, f"weights {moved:.1e}", {m: f"{results[0][0][m] / (want[m] or 1) - 1:.1e}" for m in names})
    assert moved <= 1e-5
    assert want["grad_norm"] > 0.05


@pytest.fixture(scope="module")
def resumed(folders, tmp_path_factory):
    """Move -> (metrics, weights, weights when it was saved), by who saved and by who loaded."""
    root = str(tmp_path_factory.mktemp("saved"))
    first, *_ = run_ranks(saves, 2, [(k, a, sections("grpo"), folders[m]) for k, (m, a, _) in MOVES.items()], root)
    then, *_ = run_ranks(loads, 1, [(k, b, sections("grpo"), folders[m]) for k, (m, _, b) in MOVES.items()], root)
    return first, then


@pytest.mark.parametrize("move", MOVES)
def test_resume_on_another_layout(move, resumed):
    (metrics, weights, saved), (again, got, loaded) = (found[move] for found in resumed)
    assert worst(saved, loaded) == 0
    for name in METRICS:
        assert abs(metrics[name] - again[name]) <= 1e-6 * max(1.0, abs(metrics[name])), name
    # Without its moments AdamW would go elsewhere by 1e-3, its learning rate.
    print(move, f"{worst(weights, got):.1e}")
    assert worst(weights, got) <= 1e-6 and worst(saved, weights) > 1e-4


def test_saving_leaves_no_process_behind(resumed):
    assert resumed[0]["children"] == []


def test_offload_changes_nothing(folders):
    for plain, away in run_ranks(parked, 2, {"tp": 2}, sections("ppo"), folders["dense"]):
        assert plain[0] == away[0] and (not plain[1] or worst(plain[1], away[1]) == 0)
        before, gone, after = away[2]
        assert before == after and min(before.values()) > 0 and not any(gone.values())
