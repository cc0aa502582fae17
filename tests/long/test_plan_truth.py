"""The planner says what real ranks do, in rarer combinations than those of `tests/ranks/test_plan.py`.

Record: all agree, 5 min on two cores that others used too.
"""

import pytest

from tests.ranks.test_plan import agree, dense, mixture, on_megatron

BF16, RECOMPUTED = {"dtype": "bfloat16"}, {"activation_checkpointing": "full"}
APART = {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 2}
FSDP = {
    2: {
        "experts": ("mixture", {}),
        "experts in bfloat16, recomputed": ("mixture", {"model": BF16, "policy": RECOMPUTED}),
        "prompts run once": ("dense", {"policy": {"share_prompts": True, "max_tokens_per_microbatch": 128}}),
        "logp of whole micro-batches, gathered once": (
            "dense",
            {"policy": {"chunked_loss": False, "gather": "once"}},
        ),
        "adapters added in, in bfloat16": ("dense", {"lora": {"rank": 4, "push": "merged"}, "model": BF16}),
        "adapters of odd rank": ("dense", {"lora": {"rank": 3, "push": "merged"}}),
        "a process reward model": ("dense", {"algo": {"preset": "prime"}, "policy": {"offload": "host"}}),
        "engines of two ranks": ("dense", {"rollout": {"tp": 2}}),
    },
    5: {"2 train, 2 score, 1 samples": ("dense", {"parallel": APART, "model": BF16, "algo": {"preset": "ppo"}})},
}
"""Ranks -> name -> kind of model, settings."""
MEGATRON = {
    2: {
        "PPO": ("dense", {"algo": {"preset": "ppo"}, "policy": {"offload": "host"}}),
        "tp2 without sequence parallelism": ("dense", {"parallel": {"tp": 2, "sequence_parallel": False}}),
        "tp2, attention recomputed": (
            "dense",
            {"parallel": {"tp": 2}, "policy": {"activation_checkpointing": "selective"}},
        ),
        "pp2, uneven stages, experts": ("mixture", {"parallel": {"pp": 2, "last_stage_layers": 1}}),
        "pp2 x 2 chunks, recomputed": (
            "dense",
            {"parallel": {"pp": 2, "virtual_stages": 2}, "policy": RECOMPUTED, "model": BF16},
        ),
        "ep2 x tp2, balanced": ("mixture", {"parallel": {"tp": 2, "ep": 2}, "policy": {"moe_aux_loss": 0.01}}),
        "etp2": ("mixture", {"parallel": {"tp": 2, "etp": 2}}),
        "two updates": ("dense", {"algo": {"updates_per_step": 2}}),
    },
    4: {
        "dp2 x pp2, optimizer on the host": ("dense", {"parallel": {"pp": 2}, "policy": {"host_optimizer": True}}),
        "ep2 x pp2": ("mixture", {"parallel": {"pp": 2, "ep": 2}}),
        "cp2 x tp2": ("dense", {"parallel": {"cp": 2, "tp": 2}}),
    },
    5: {"tp2 trains, tp2 scores, 1 samples": ("dense", {"parallel": APART | {"tp": 2}})},
}
"""Ranks -> name -> kind of model, settings."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"dense": dense(folder), "mixture": mixture(folder / "mixture")}


@pytest.mark.parametrize("ranks", FSDP)
def test_fsdp(ranks, folders, tmp_path):
    agree({name: (folders[kind], more) for name, (kind, more) in FSDP[ranks].items()}, ranks, tmp_path)


@pytest.mark.parametrize("ranks", MEGATRON)
def test_megatron(ranks, folders, tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    cases = {name: (folders[kind], on_megatron(more)) for name, (kind, more) in MEGATRON[ranks].items()}
    agree(cases, ranks, tmp_path)
