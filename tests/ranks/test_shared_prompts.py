"""Law 2 with shared prompts: on or off, on any number of ranks, in any micro-batches, the gradient is the same."""

import pytest
import torch

from spmdrl.data.tree import prompt_lengths
from spmdrl.policy.models import Models
from tests.ranks.cases import (
    build_policy,
    config,
    full_weights,
    gradients_of,
    packed,
    relative,
    small_model,
    synthetic_batch,
    update_models,
)
from tests.ranks.harness import run_ranks

EXACT = 1e-10
PRESETS = ("grpo", "gspo", "kl_cov")
WHOLE = 1 << 20


def float64_norm(self, x):
    """Replaces Qwen2RMSNorm, without its way through float32."""
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def learned(world, folder, preset, share, budget):
    """Returns gradients of two optimizer steps, weights after, metrics."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = float64_norm
    cfg = config(
        model={"path": folder, "dtype": "float64"},
        algo={"preset": preset, "updates_per_step": 2, "cov_ratio": 0.1},
        policy={"share_prompts": share, "max_tokens_per_microbatch": budget},
        rollout={"temperature": 0.8},
        parallel={"sp": world.sp_size},
    )
    policy = build_policy(cfg, world)
    everyone = synthetic_batch(6, 4)
    batch = packed(cfg, world, everyone)
    if share:
        batch.seq["common"] = prompt_lengths(batch.lengths, batch.token["mask"])
    metrics = {}
    run = lambda: metrics.update(update_models(cfg, world, Models(policy), everyone, batch))  # noqa: E731
    gradients = gradients_of(policy, run)
    return gradients, full_weights(policy), metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("shared") / "policy", 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_layout_shared_prompts_learn_the_same(folder, preset):
    (want, weights, metrics), *_ = run_ranks(learned, 1, folder, preset, False, WHOLE)
    for ranks, sp, budget in ((1, 1, WHOLE), (1, 1, 70), (2, 1, 70), (2, 2, WHOLE)):
        (got, after, numbers), *_ = run_ranks(learned, ranks, folder, preset, True, budget, sp=sp)
        for a, b in zip(want, got, strict=True):
            assert relative(a, b) < EXACT, (ranks, sp, budget)
        assert relative(weights, after) < EXACT
        assert abs(numbers["loss"] - metrics["loss"]) < 1e-9
    assert metrics["grad_norm"] > 1e-3


def test_layout_a_group_on_one_rank_is_fewer_micro_batches(folder):
    count = {share: run_ranks(learned, 2, folder, "grpo", share, 70)[0][2]["microbatches"] for share in (False, True)}
    assert count[True] < count[False]
