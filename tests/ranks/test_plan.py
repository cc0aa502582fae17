"""The planner says what real ranks do: bytes held, peaks, bytes on the wire and pushes, on tiny models over gloo."""

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from spmdrl.plan.run import side_by_side
from tests.ranks.cases import config, small_model
from tests.ranks.harness import run_ranks
from tests.ranks.plan_cases import planned, planned_save, real, saves
from tests.unit import vision_models

SIZES = dict(vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
HELD, PEAK, SENT, SAVED = 0.01, 0.1, 0.02, 0.05

FSDP = {
    1: {"one rank": {}},
    2: {
        "dp2": {},
        "sp2, two updates": {"parallel": {"sp": 2}, "algo": {"updates_per_step": 2}},
        "PPO in bfloat16, on disk": {
            "model": {"dtype": "bfloat16"},
            "algo": {"preset": "ppo"},
            "policy": {"offload": "disk"},
            "reference": {"offload": "host", "refresh_every": 2},
        },
        "adapters, recomputed, on the host": {
            "lora": {"rank": 4},
            "policy": {"activation_checkpointing": "full", "offload": "host"},
        },
    },
    4: {
        "dp4": {},
        "dp4, each micro-batch reduced": {"model": {"dtype": "bfloat16"}, "policy": {"reduce_gradients": "each"}},
        "hsdp2x2": {"parallel": {"dp_replicate": 2}},
        "hsdp2x2, each micro-batch reduced": {
            "parallel": {"dp_replicate": 2},
            "policy": {"reduce_gradients": "each"},
        },
    },
}
"""Ranks -> name -> settings."""
IMAGES = {
    "qwen2_5_vl": {"policy": {"activation_checkpointing": "full"}},
    "qwen3_vl": {"model": {"dtype": "bfloat16"}},
    "smolvlm, the tower frozen": {"model": {"freeze": ("vision",)}},
}
"""Family, and what is special -> settings; on two ranks."""
MEGATRON = {
    2: {
        "dp2": ("dense", {}),
        "tp2": ("dense", {"parallel": {"tp": 2}}),
        "pp2, recomputed": (
            "dense",
            {"parallel": {"pp": 2}, "policy": {"activation_checkpointing": "full"}},
        ),
        "pp2 x 2 chunks, six micro-batches": (
            "dense",
            {"parallel": {"pp": 2, "virtual_stages": 2}, "rollout": {"prompts_per_step": 3}},
        ),
        "cp2 in bfloat16": (
            "dense",
            {"parallel": {"cp": 2}, "model": {"dtype": "bfloat16"}, "policy": {"offload": "host"}},
        ),
        "ep2, optimizer on the host": (
            "mixture",
            {"parallel": {"ep": 2}, "policy": {"host_optimizer": True}},
        ),
    },
    4: {
        "tp2 x pp2": ("dense", {"parallel": {"tp": 2, "pp": 2}}),
        "ep2 trains, 2 sample": ("mixture", {"parallel": {"ep": 2, "placement": "split", "rollout_ranks": 2}}),
    },
}
"""Ranks -> name -> kind of model, settings."""
SPLIT = {
    "2 train, 2 sample together": {
        "parallel": {"placement": "split", "rollout_ranks": 2},
        "rollout": {"tp": 2},
    },
    "2 train, 1 scores, 1 samples": {"parallel": {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 1}},
}
"""Name -> settings; on four ranks."""
WIDE = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
"""Sizes beside which the names and shapes in a checkpoint's files are few bytes."""
SAVES = {
    "float32": {},
    "PPO in bfloat16, with a reference that is refreshed": {
        "model": {"dtype": "bfloat16"},
        "algo": {"preset": "ppo"},
        "reference": {"refresh_every": 2},
    },
    "adapters": {"lora": {"rank": 32}},
}
MEGATRON_SAVES = {
    "dp2": {},
    "tp2 in bfloat16": {"parallel": {"tp": 2}, "model": {"dtype": "bfloat16"}},
    "pp2, optimizer on the host": {"parallel": {"pp": 2}, "policy": {"host_optimizer": True}},
}
"""Name -> settings; on two ranks."""
SETTINGS = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 16, "max_new_tokens": 48},
    "optimizer": {"lr": 1e-3, "clip_grad_norm": 1.0},
    "policy": {"max_tokens_per_microbatch": 64},
    "algo": {"kl_coef": 0.1},
    "run": {"steps": 4, "device": "cpu"},
}


def settings(folder: str, saved: Path, sections: dict):
    """Config of a case. folder: the model's. saved: the run's."""
    changed = {"model": {"path": folder}, "run": {"dir": str(saved)}}
    names = SETTINGS.keys() | changed | sections.keys()
    return config(**{n: SETTINGS.get(n, {}) | changed.get(n, {}) | sections.get(n, {}) for n in names})


def seeing(family: str, folder: Path) -> str:
    """The folder of a small model that reads images."""
    vision_models.tiny(family).save_pretrained(folder)
    return str(folder)


def both(cases: list, ranks: int) -> dict:
    """Runs jobs on real ranks and on paper. cases: (key, config). Returns (key, rank) -> (real, planned)."""
    found = run_ranks(real, ranks, cases, limit=240.0)
    keys = [(key, rank) for key, _ in cases for rank in range(ranks)]
    configs = dict(cases)
    tasks = [partial(planned, configs[key], rank, ranks) for key, rank in keys]
    return {(key, rank): (found[rank][key], told) for (key, rank), told in zip(keys, side_by_side(tasks), strict=True)}


def compare(measured: dict, told: dict) -> list[str]:
    """Returns each number of which the planner is wrong."""
    wrong = []

    def check(name: str, is_: float, said: float, bound: float) -> None:
        if abs(said - is_) > bound * abs(is_):
            wrong.append(f"{name}: {is_} bytes, planned {said}")

    def check_all(name: str, is_: dict, said: dict, bound: float) -> None:
        for key in is_ | said:
            check(f"{name} {key}", is_.get(key, 0), said.get(key, 0), bound)

    # An engine's bytes have a test of their own: test_paper_engine.py.
    own = [{k: n for k, n in x["held"].items() if "engine" not in k and "KV" not in k} for x in (measured, told)]
    check_all("held:", *own, HELD)
    check_all("off the device:", measured["away"], told["away"], HELD)
    for name in ("logp", "update"):
        check(f"peak of {name}", measured[name], told[name], PEAK)
        check_all(f"{name} sent by", measured[f"{name} sent"], told[f"{name} sent"], SENT)
    if measured["received"] or measured["push sent"]:
        check("peak of push", measured["push"], told["push"], PEAK)
    else:
        # Without messages the sums of words alone take memory.
        whole = sum(own[0].values())
        check("memory while pushing", whole + measured["push"], whole + told["push"], HELD)
    check("received by the push", measured["received"], told["received"], 0)
    check("sent by the push", measured["push sent"], told["push sent"], SENT)
    if measured["boxes"] != told["boxes"]:
        wrong.append("boxes of the push differ")
    return wrong


def said(wrong: dict) -> str:
    """All that is wrong, in lines."""
    return "\n".join(f"{key}: {line}" for key, lines in wrong.items() for line in lines)


@cache
def dense(folder) -> str:
    """The folder of a small Qwen2."""
    return small_model(folder / "dense", **SIZES)


def mixture(folder) -> str:
    """The folder of a small Qwen3-MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = SIZES | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, moe_intermediate_size=64)
    more = dict(num_experts=4, num_experts_per_tok=2, max_position_embeddings=128, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**values, **more, pad_token_id=0)).save_pretrained(folder)
    return str(folder)


def on_megatron(more: dict) -> dict:
    """Returns the settings of a case with Megatron as its backend."""
    return more | {"policy": {"backend": "megatron"} | more.get("policy", {})}


def agree(cases: dict, ranks: int, folder: Path) -> None:
    """Checks that plans of jobs say what these do. cases: name -> (folder of the model, settings)."""
    configs = [(name, settings(model, folder / f"run {name}", more)) for name, (model, more) in cases.items()]
    wrong = {key: lines for key, (is_, told) in both(configs, ranks).items() if (lines := compare(is_, told))}
    assert not wrong, said(wrong)


@pytest.mark.parametrize("ranks", FSDP)
def test_fsdp(ranks, tmp_path):
    agree({name: (dense(tmp_path), more) for name, more in FSDP[ranks].items()}, ranks, tmp_path)


def test_images(tmp_path):
    """Prompts consist of images on both sides, and the vision tower works on them."""
    cases = {name: (seeing(name.split(",")[0], tmp_path / name), more) for name, more in IMAGES.items()}
    agree(cases, 2, tmp_path)


@pytest.mark.parametrize("ranks", MEGATRON)
def test_megatron(ranks, tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    folders = {"dense": dense(tmp_path), "mixture": mixture(tmp_path / "mixture")}
    cases = {name: (folders[kind], on_megatron(more)) for name, (kind, more) in MEGATRON[ranks].items()}
    agree(cases, ranks, tmp_path)


def test_split(tmp_path):
    agree({name: (dense(tmp_path), more) for name, more in SPLIT.items()}, 4, tmp_path)


def test_checkpoint(tmp_path):
    folder = small_model(tmp_path / "wide", **WIDE)
    cases = dict(SAVES)
    if find_spec("megatron"):
        cases |= {f"Megatron, {name}": on_megatron(more) for name, more in MEGATRON_SAVES.items()}
    configs = [(name, settings(folder, tmp_path / name, more)) for name, more in cases.items()]
    real = run_ranks(saves, 2, configs, limit=240.0)[0]
    tasks = [partial(planned_save, cfg, 2) for _, cfg in configs]
    told = dict(zip(cases, side_by_side(tasks), strict=True))
    print({name: (real[name], told[name]) for name in cases})
    wrong = [f"{n}: {real[n]} bytes, planned {told[n]}" for n in cases if abs(told[n] - real[n]) > SAVED * real[n]]
    assert not wrong, "\n".join(wrong)
