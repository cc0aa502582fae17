"""Law 2 for episodes that branch: shared tokens once or per path, any ranks and micro-batches, one gradient.

The reference is the formula, written out on plain Hugging Face models path by path: each sampled token counts once, and
a mean over sequences is a mean over episodes.
"""

import pytest
import torch

from spmdrl.data.microbatch import units_of
from spmdrl.data.pack import from_episodes
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from tests.ranks.cases import (
    Rewind,
    branching_batch,
    build_policy,
    config,
    float64_softmax,
    full_weights,
    gradients_of_all,
    packed,
    relative,
    small_model,
    update_models,
)
from tests.ranks.harness import run_ranks
from tests.ranks.test_shared_prompts import float64_norm

EXACT = 1e-10
WHOLE = 1 << 20
TEMPERATURE = 0.8
KINDS = {
    "grpo": {"preset": "grpo", "kl_coef": 0.0, "aggregation": "seq-mean-token-mean"},
    "token mean": {"preset": "grpo", "kl_coef": 0.0, "aggregation": "token-mean"},
    "gspo": {"preset": "gspo"},
    "clip_cov": {"preset": "clip_cov", "cov_ratio": 0.2, "cov_low": -9.0, "cov_high": 9.0, "updates_per_step": 2},
    "ppo": {"preset": "ppo", "kl_coef": 0.0},
    "resampled": {"preset": "gspo", "aggregation": "seq-mean-token-mean"},
}
LAYOUTS = ((1, 1, True, WHOLE), (2, 1, False, 130), (2, 1, True, 70), (2, 2, True, 90), (4, 4, True, WHOLE))
"""Ranks, sp, share, token budget."""


def learned(world, folders, kinds, share, budget):
    """Returns for each kind: gradients of a step's optimizer steps by model, the policy's weights after, metrics."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = float64_norm
    everyone, out, kept = branching_batch(6, 3), {}, {}
    for kind, algo in kinds.items():
        cfg = config(
            model={"path": folders["policy"], "dtype": "float64"},
            algo=algo,
            policy={"share_prompts": share, "max_tokens_per_microbatch": budget},
            rollout={"temperature": TEMPERATURE},
            parallel={"sp": world.sp_size},
            # Some episodes are drawn twice, others not at all.
            filter={"resample": "pow" if kind == "resampled" else "none"},
        )
        if not kept:
            kept["policy"] = Rewind(build_policy(cfg, world))
            kept["critic"] = Rewind(FsdpPolicy(cfg, world, 100, path=folders["critic"], head="value"))
        models = {name: each(cfg) for name, each in kept.items() if name == "policy" or algo["preset"] == "ppo"}
        batch = packed(cfg, world, everyone, turn_rewards=True)
        metrics = {}
        run = lambda: metrics.update(update_models(cfg, world, Models(**models), everyone, batch))  # noqa: B023, E731
        out[kind] = gradients_of_all(models, run), full_weights(models["policy"]), metrics
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("branches")
    return {"policy": small_model(root / "policy", 0), "critic": small_model(root / "critic", 1, scalar=True)}


@pytest.fixture(scope="module")
def alone(folders):
    return run_ranks(learned, 1, folders, KINDS, False, WHOLE)[0]


@pytest.mark.parametrize(("ranks", "sp", "share", "budget"), LAYOUTS)
def test_layout_branches_learn_the_same(folders, alone, ranks, sp, share, budget):
    found = run_ranks(learned, ranks, folders, KINDS, share, budget, sp=sp)[0]
    for kind, (want, weights, metrics) in alone.items():
        got, after, numbers = found[kind]
        for name, steps in want.items():
            for a, b in zip(steps, got[name], strict=True):
                assert relative(a, b) < EXACT, (kind, name)
        assert relative(weights, after) < EXACT, kind
        assert numbers["microbatches"] > 1 or budget == WHOLE
        same = [name for name in metrics if name.split("/")[0] in ("loss", "reward", "mismatch", "entropy", "ratio")]
        assert len(same) > 5 and all(abs(numbers[name] - metrics[name]) < 1e-9 for name in same), kind
        assert metrics["grad_norm"] > 1e-3


def test_branches_learn_by_the_formula(folders, alone, monkeypatch):
    """Path by path on the plain model, by lists of segments and without any of the library's batches."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    episodes = branching_batch(6, 3)
    tokens = sum(len(s) for e in episodes for s in e.segments if s.sampled)
    for kind in ("token mean", "grpo"):
        hf = AutoModelForCausalLM.from_pretrained(
            folders["policy"], dtype=torch.float64, attn_implementation="eager"
        ).train()
        hf.get_input_embeddings().padding_idx = None
        total, loss = torch.zeros((), dtype=torch.float64), 0.0
        with float64_softmax():
            for e in episodes:
                scores = torch.tensor([x.reward for x in episodes if x.position == e.position], dtype=torch.float64)
                advantage = float((e.reward - scores.mean()) / (scores.std() + 1e-6))
                own = sum(len(s) for s in e.segments if s.sampled)
                weight = 1 / tokens if kind == "token mean" else 1 / len(episodes) / own
                loss -= advantage * weight * own
                counted: set[int] = set()
                for path in e.paths():
                    ids, at = torch.cat([e.segments[i].tokens for i in path]), 0
                    logits = hf(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE
                    logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
                    for i in path:
                        end = at + len(e.segments[i])
                        if e.segments[i].sampled and i not in counted:
                            # At a ratio of 1 its gradient is that of logp.
                            total = total - advantage * weight * logp[at - 1 : end - 1].sum()
                            counted.add(i)
                        at = end
        total.backward()
        (mine,) = alone[kind][0]["policy"]
        want = {name: p.grad for name, p in hf.named_parameters() if name in mine}
        assert want.keys() == mine.keys() and relative(want, mine) < EXACT, kind
        assert alone[kind][2]["loss"] == pytest.approx(loss, abs=1e-9)


def by_backend(world, folders, kind, cases):
    """Returns for each algorithm the metrics and weights of a step in float32, from several micro-batches."""
    from tests.ranks.megatron_cases import open_models, weights_of

    out = {}
    for name, algo in cases.items():
        sections = {"algo": algo, "policy": {"max_tokens_per_microbatch": 140}, "optimizer": {"lr": 1e-3, "eps": 1e-3}}
        cfg, here, models = open_models(world, {}, sections, folders, kind)
        out[name] = update_models(cfg, here, models, branching_batch(6, 3)), weights_of(here, models)
    return out


def test_megatron_learns_branches_as_fsdp_does(folders):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    cases = {name: KINDS[name] for name in ("grpo", "gspo")}
    want = run_ranks(by_backend, 1, folders, "fsdp", cases)[0]
    got = run_ranks(by_backend, 1, folders, "megatron", cases)[0]
    for name, (metrics, weights) in want.items():
        assert relative(weights, got[name][1]) < 1e-5, name
        assert abs(metrics["loss"] - got[name][0]["loss"]) < 1e-6 and got[name][0]["microbatches"] > 1


def test_shared_tokens_of_branches_halve_the_work():
    batch = from_episodes(branching_batch(6, 3))
    units = units_of(batch, WHOLE, share=True)
    assert sum(unit.tokens for unit in units) * 2 < batch.n_tokens
    assert sum(unit.tokens for unit in units_of(batch, WHOLE, share=False)) == batch.n_tokens
