"""Law 2 with replayed experts, and whole steps with them: recorded by the engine, passed to the trainer."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmdrl.data.distribute import assign_updates, balance
from spmdrl.data.pack import from_episodes
from spmdrl.data.tree import prompt_lengths
from spmdrl.hub.folder import TINY
from spmdrl.hub.routing import FREE, experts_of
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.spmd.seeds import generator_for
from tests.ranks.cases import VOCAB, config, gradients_of, relative, synthetic_batch, update_models
from tests.ranks.demo import metrics, train_demo
from tests.ranks.harness import run_ranks
from tests.ranks.test_shared_prompts import float64_norm

EXACT = 1e-10
WHOLE = 1 << 20
EXPERTS, TOP_K = 8, 2


def moe_model(folder, **changes) -> str:
    """A random Qwen3 with 3 layers, experts in the second alone, as a HF folder with the demo's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values | changes)).double()
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(p)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return moe_model(tmp_path_factory.mktemp("experts") / "policy")


def told_episodes(prompts: int, samples: int) -> list:
    """Makes random choices: alike for all of a prompt's group except one group; some unknown, as every last one."""
    out = []
    for t in synthetic_batch(prompts, samples):
        length = int((~t.mask).int().argmin())
        group, own = (torch.Generator().manual_seed(100 * t.position + i) for i in (99, t.sample))
        told = torch.cat(
            [torch.rand(n, EXPERTS, generator=g) for n, g in ((length, group), (len(t.mask) - length, own))]
        )
        told = told.argsort(1)[:, :TOP_K].to(torch.int16)
        told[-1] = told[length + 1 :: 7] = FREE
        if t.position == 1 and t.sample == 2:
            told[3] = told[3].flip(0) + 1 - 2 * (told[3].flip(0) > 3)
        out.append(dataclasses.replace(t, experts=told))
    return out


def learned(world, folder, cases):
    """Returns gradients of two optimizer steps for each (share prompts, budget, replay).

    Rank 0 brings all samples, as if the others' engines had none.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    Qwen3MoeRMSNorm.forward = float64_norm
    softmax = torch.nn.functional.softmax
    # The router's too, whose gradient would be rounded to float32 before or after samples of a prompt are summed.
    torch.nn.functional.softmax = lambda x, dim=None, _stacklevel=3, dtype=None: softmax(x, dim)
    everyone = told_episodes(6, 4)
    order = list(range(6))
    generator_for(3).shuffle(order)
    out = []
    for share, budget, replay in cases:
        cfg = config(
            model={"path": folder, "dtype": "float64"},
            algo={"updates_per_step": 2},
            policy={"share_prompts": share, "max_tokens_per_microbatch": budget},
            rollout={"temperature": 0.8},
            parallel={"sp": world.sp_size},
        )
        batch = from_episodes(everyone if world.rank == 0 else [], (), TOP_K)
        batch.seq["seed"], batch.seq["work"] = batch.seq["position"].clone(), batch.lengths
        if share:
            batch.seq["common"] = prompt_lengths(batch.lengths, batch.token["mask"])
        batch = balance(assign_updates(batch, 2, 6, order), world)
        assert batch.token["experts"].shape == (batch.n_tokens, TOP_K) and batch.token["experts"].dtype == torch.int16
        policy = FsdpPolicy(cfg, world, 100, routing_replay=replay)
        models = Models(policy)
        out.append(gradients_of(policy, partial(update_models, cfg, world, models, everyone, batch)))
    return out


def test_layout_replayed_experts_learn_the_same(folder):
    plain = (False, WHOLE, True)
    (want, free, *alone), *_ = run_ranks(
        learned, 1, folder, [plain, (False, WHOLE, False), (False, 70, True), (True, WHOLE, True)]
    )
    two, *_ = run_ranks(learned, 2, folder, [(True, 70, True)])
    sliced, *_ = run_ranks(learned, 2, folder, [(False, 70, True), (True, WHOLE, True)], sp=2)
    for case, got in enumerate([*alone, *two, *sliced]):
        for a, b in zip(want, got, strict=True):
            assert relative(a, b) < EXACT, (case, relative(a, b))
    assert relative(want[0], free[0]) > 0.1, "the choice matters"
    assert want[0]["model.layers.1.mlp.gate.weight"].abs().max() > 1e-6


SETTINGS = {
    "run": {"steps": 3},
    "model": {"dtype": "float32"},
    "rollout": {
        "routing_replay": True,
        "samples_per_prompt": 2,
        "max_new_tokens": 64,
        "oversample": 2.0,
        "partial_steps": 1,
    },
    "algo": {"kl_coef": 0.0, "entropy_coef": 0.0, "updates_per_step": 2},
    "policy": {"activation_checkpointing": "full"},
    "eval": {"every": 0},
    "reward": {"function": str(Path(__file__).with_name("length_reward.py"))},
    "optimizer": {"lr": 3e-3},
    "checkpoint": {"at_end": True},
}


def test_three_steps_of_grpo_with_the_engines_experts(folder, tmp_path):
    sections = SETTINGS | {"model": SETTINGS["model"] | {"path": folder}}
    assert run_ranks(train_demo, 2, str(tmp_path / "run"), sections) == [(0, 3, 6)] * 2
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["grad_norm"] > 1e-3 and abs(row["loss"]) > 1e-6
        assert row["logp_diff/max"] > 0
    # Samples of this step's weights alone: engine and trainer differ by rounding.
    assert rows[0]["logp_diff/max"] < 1e-5
    assert sum(row["rollout/stale_tokens"] for row in rows) > 0, "some were carried, with the choices of their time"
    # The save is a checkpoint like any other, and goes on with another number of ranks.
    saved = load_file(tmp_path / "run" / "checkpoints" / "step_3" / "model" / "model.safetensors")
    assert saved.keys() == load_file(Path(folder) / "model.safetensors").keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_3" / "model")
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj.detach()
    parts = [[saved[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(EXPERTS)]
    assert torch.equal(gate_up, torch.stack([torch.cat(pair) for pair in parts]))
    longer = sections | {"run": {"steps": 4}}
    assert run_ranks(train_demo, 1, str(tmp_path / "run"), longer) == [(3, 4, 8)]


def test_replay_is_for_models_with_experts():
    with pytest.raises(ValueError, match="no router was found in Qwen2ForCausalLM"):
        experts_of(TINY)
