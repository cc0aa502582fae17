"""Law 2: one step of the library is the formula, written out on plain Hugging Face models, whatever the layout.

Gradients, weights and losses in float64, to 1e-10 relative. That layouts agree with each other, for every preset, is in
`test_layout_presets.py`.
"""

import dataclasses

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from spmdrl.config.schema import OptimizerConfig
from spmdrl.data.distribute import assign_updates
from spmdrl.data.pack import from_episodes
from spmdrl.hub.folder import TINY
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.rl.compose import compose
from spmdrl.spmd.seeds import generator_for
from tests.ranks.cases import (
    build_policy,
    config,
    float64_softmax,
    full_weights,
    gradients_of_all,
    relative,
    small_model,
    synthetic_batch,
    update_models,
    update_once,
)
from tests.ranks.harness import run_ranks

EXACT = 1e-10
TEMPERATURE = 0.7
LAYOUTS = ((1, 4096, 1), (2, 64, 1), (2, 64, 2))
"""Ranks, token budget, sp."""
EACH = ((1, 64, 1), (2, 64, 1), (4, 64, 1, 2))
"""Layouts with gradients that are reduced after each micro-batch; a fourth number counts the copies of HSDP."""


# ── a step without signal ────────────────────────────────────────────────────


def nothing_to_learn(world, folder):
    """Makes a step in which all rewards agree: no rank runs a forward under skip_zero_advantage, and nothing moves."""
    cfg = config(model={"path": folder, "dtype": "float64"}, algo={"skip_zero_advantage": True, "updates_per_step": 2})
    policy = build_policy(cfg, world)
    before = full_weights(policy)
    everyone = [dataclasses.replace(t, reward=1.0) for t in synthetic_batch()]
    metrics = update_once(cfg, world, policy, None, everyone)
    after = full_weights(policy)
    counts = (policy.version, policy.updates_done, policy.updates_due)
    return metrics, all(torch.equal(before[n], after[n]) for n in before), counts


def test_layout_a_step_without_signal_moves_nothing(folders):
    for n in (1, 2):
        for metrics, same, counts in run_ranks(nothing_to_learn, n, folders["policy"]):
            # The engine has no reason to receive the weights again; the schedule goes on.
            assert same and counts == (0, 0, 2)
            assert metrics["grad_norm"] == 0 and metrics["microbatches"] == 0


# ── groups of parameters ─────────────────────────────────────────────────────


def grouped(world, folder, way):
    """Makes a pass and an update of a model that FSDP gathers in one way; returns what each gathered, and the weights.

    The model has two layers. What is gathered is counted in messages, and divided by the micro-batches of the pass.
    """
    counts, wait = [0], FSDPParamGroup.wait_for_unshard

    def counted(self):
        counts[-1] += self._all_gather_result is not None
        wait(self)

    FSDPParamGroup.wait_for_unshard = counted
    policy = {"max_tokens_per_microbatch": 64, "gather": way}
    cfg = config(model={"path": folder, "dtype": "float32"}, policy=policy)
    policy, batch = build_policy(cfg, world), from_episodes(synthetic_batch())
    policy.logprobs(batch, 1.0)
    assert all(group.is_sharded for module in policy.gathering for group in groups_of(module)), "freed after a pass"
    counts.append(0)
    micros = len(policy.microbatches(batch)), update_once(cfg, world, policy, None, synthetic_batch())["microbatches"]
    assert min(micros) > 1
    return counts, micros, full_weights(policy)


def groups_of(module):
    return [group for group in [module._get_fsdp_state()._fsdp_param_group] if group]


def test_layout_every_way_to_gather_is_the_same_step_and_gathers_as_often_as_it_says(folders):
    for n in (1, 2):
        found = {way: run_ranks(grouped, n, folders["policy"], way)[0] for way in ("whole", "once", "layers")}
        for way, (counts, (scored, learnt), weights) in found.items():
            # The two layers, and the rest of the model.
            expected = {"whole": [1, 1], "once": [3, 3], "layers": [1 + 2 * scored, 1 + 4 * learnt]}
            assert counts == expected[way], (n, way)
            assert all(torch.equal(x, found["whole"][2][name]) for name, x in weights.items()), (n, way)


# ── gradients between micro-batches ──────────────────────────────────────────


def between(world, folder, how):
    """Makes a step; returns the most gradients that a rank holds where a micro-batch starts, by their kind."""
    policy = {"max_tokens_per_microbatch": 64, "reduce_gradients": how, "gather": "layers"}
    # bfloat16 gradients are accumulated in float32.
    cfg = config(model={"path": folder, "dtype": "bfloat16"}, policy=policy)
    policy = build_policy(cfg, world)
    forward, held = policy._forward, {"whole": 0, "shards": 0}

    def counted(*args, **more):
        groups = [g for m in policy.gathering for g in groups_of(m)]
        whole = [x for g in groups for p in g.fsdp_params if (x := p.unsharded_accumulated_grad) is not None]
        assert all(x.dtype == torch.float32 for x in whole)
        # Copies of a sharded model keep the sum over one copy's ranks in place of the gradients.
        sums = [g._partial_reduce_output for g in groups if g._partial_reduce_output is not None]
        shards = [p.grad.to_local() for p in policy.shards if p.grad is not None]
        held["whole"] = max(held["whole"], sum(x.numel() for x in whole))
        held["shards"] = max(held["shards"], sum(x.numel() for x in (*shards, *sums)))
        return forward(*args, **more)

    policy._forward = counted
    assert update_once(cfg, world, policy, None, synthetic_batch())["microbatches"] > 1
    return held, sum(p.numel() for p in policy.shards), sum(p.to_local().numel() for p in policy.shards)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2)])
def test_gradients_between_micro_batches_are_the_whole_models_or_a_shard(ranks, copies, folders):
    for how in ("last", "each"):
        for held, model, shard in run_ranks(between, ranks, folders["policy"], how, dp_replicate=copies):
            # A shard's sums may be padded to rows of all ranks.
            assert shard <= model // (ranks // copies) + 64
            if how == "last":
                assert held == {"whole": model, "shards": 0}
            else:
                assert held["whole"] == 0 and shard <= held["shards"] <= shard + 64


# ── plain Hugging Face: one forward for each sequence, AdamW of torch, the formula written out ───────────────────────


@dataclasses.dataclass
class Learnt:
    """Result of one model in a step: for each optimizer step its loss and its gradient, then its weights."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def load(folder, scalar=False):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
    # Here no token is padding, the padding token neither: torch would leave out the gradient of its embedding.
    model.get_input_embeddings().padding_idx = None
    return model


def of(lm, t):
    """Returns logp and entropy of an episode's sampled tokens."""
    log_p = torch.log_softmax(lm(input_ids=t.tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
    keep = t.mask[1:]
    return log_p.gather(1, t.tokens[1:, None])[:, 0][keep], -(log_p.exp() * log_p).sum(-1)[keep]


def value_of(critic, t):
    """Returns the value of the state before each sampled token."""
    return critic.score(critic.model(input_ids=t.tokens[None]).last_hidden_state[0, :-1])[:, 0][t.mask[1:]]


def shares(everyone) -> list[list[int]]:
    """Indices of the episodes that each of two optimizer steps uses."""
    prompts = max(t.position for t in everyone) + 1
    order = list(range(prompts))
    generator_for(3).shuffle(order)
    update = assign_updates(from_episodes(everyone), 2, prompts, order).seq["update"].tolist()
    return [[i for i, u in enumerate(update) if u == share] for share in range(2)]


def descend(model, loss_of, picks, lr, clip=0.0) -> Learnt:
    """Makes one AdamW step for each list of episodes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    out = Learnt([], [], {})
    for picked in picks:
        loss = loss_of(picked)
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
        for p in model.parameters():
            p.grad.mul_(min(1.0, clip / (norm + 1e-6)) if clip else 1.0)
        out.losses.append(loss.item())
        out.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    out.weights = {n: p.detach() for n, p in model.named_parameters()}
    return out


def ours(world, sections, folders, budget, reduce) -> tuple[dict, dict[str, Learnt]]:
    """Makes the same step by the library: metrics, and the result of each model (its losses are in the metrics)."""
    cfg = config(
        **sections,
        model={"path": folders["policy"], "dtype": "float64"},
        rollout={"temperature": TEMPERATURE},
        policy={"max_tokens_per_microbatch": budget, "reduce_gradients": reduce},
        parallel={"sp": world.sp_size},
    )
    algo = compose(cfg)
    models = Models(build_policy(cfg, world))
    if "reference" in algo.needs:
        models.reference = FsdpPolicy(cfg, world, 0, False, folders["reference"])
    if "critic" in algo.needs:
        own = OptimizerConfig(lr=cfg.critic.lr, clip_grad_norm=0.0)
        models.critic = FsdpPolicy(cfg, world, 100, True, folders["critic"], "value", own)
    trained, metrics = {"policy": models.policy, **models.trained()}, {}
    seen = gradients_of_all(trained, lambda: metrics.update(update_models(cfg, world, models, synthetic_batch())))
    return metrics, {n: Learnt([], seen[n], full_weights(model)) for n, model in trained.items()}


def check(sections, folders, want: dict[str, Learnt], places=LAYOUTS, reduce="last") -> list[dict]:
    """Checks that the library learns what `want` says, in every layout; returns the metrics of each."""
    out = []
    for n, budget, sp, *copies in places:
        more = {"dp_replicate": copies[0] if copies else 1}
        for metrics, got in run_ranks(ours, n, sections, folders, budget, reduce, sp=sp, **more):
            assert got.keys() == want.keys()
            for name, learnt in want.items():
                prefix = "" if name == "policy" else f"{name}/"
                assert abs(metrics[f"{prefix}loss"] - sum(learnt.losses) / len(learnt.losses)) < EXACT
                assert len(got[name].gradients) == len(learnt.gradients) == 2
                for a, b in zip(learnt.gradients, got[name].gradients, strict=True):
                    assert relative(a, b) < EXACT, (name, n, budget, sp)
                assert relative(learnt.weights, got[name].weights) < EXACT, (name, n, budget, sp)
            out.append(metrics)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {n: small_model(root / n, i, n == "critic") for i, n in enumerate(("policy", "reference", "critic"))}


def group_advantages(everyone) -> torch.Tensor:
    """Computes (r - mean) / (std + 1e-6) inside each group of three."""
    groups = torch.tensor([t.reward for t in everyone], dtype=torch.float64).view(-1, 3)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def surrogate(logp, old, advantage, low, high):
    """Computes -min(A r, A clip(r))."""
    ratio = torch.exp(logp - old)
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - low, 1 + high))


def tokens_in(everyone, picked) -> int:
    return sum(int(everyone[i].mask.sum()) for i in picked)


# ── GRPO: token-mean, clip higher, k3 in the loss, an entropy bonus, a clipped gradient ──────────────────────────────


def test_layout_grpo_is_the_formula_on_plain_hugging_face(folders):
    kl_coef, entropy_coef, low, high, lr, clip = 0.05, 0.01, 0.1, 0.15, 2e-5, 0.5
    everyone = synthetic_batch()
    advantage = group_advantages(everyone)
    with float64_softmax():
        model, reference = load(TINY), load(folders["reference"])
        with torch.no_grad():
            old, ref = [of(model, t)[0] for t in everyone], [of(reference, t)[0] for t in everyone]

        def loss_of(picked):
            total = torch.zeros((), dtype=torch.float64)
            for i in picked:
                logp, entropy = of(model, everyone[i])
                d = logp - ref[i]
                k3 = (torch.exp(-d) - 1 + d).clamp(max=10)  # verl bounds it the same way.
                total = (
                    total
                    + (surrogate(logp, old[i], advantage[i], low, high) + kl_coef * k3 - entropy_coef * entropy).sum()
                )
            return total / tokens_in(everyone, picked)

        want = descend(model, loss_of, shares(everyone), lr, clip)
    sections = {
        "algo": {
            "preset": "grpo",
            "aggregation": "token-mean",
            "kl_coef": kl_coef,
            "entropy_coef": entropy_coef,
            "clip_low": low,
            "clip_high": high,
            "updates_per_step": 2,
        },
        "optimizer": {"lr": lr, "clip_grad_norm": clip},
    }
    for metrics in check(sections, folders | {"policy": "tiny"}, {"policy": want}):
        assert metrics["grad_norm"] > clip and metrics["kl/mean"] > 0.01


# ── PPO: GAE with a critic, KL in the reward, both clips ─────────────────────


def gae(reward, value, gamma, lam):
    """Goes backwards over the sampled tokens of one response."""
    out, later = torch.zeros_like(value), 0.0
    for t in reversed(range(len(value))):
        after = value[t + 1] if t + 1 < len(value) else 0.0
        later = reward[t] + gamma * after - value[t] + gamma * lam * later
        out[t] = later
    return out


def test_layout_ppo_is_the_formula_on_plain_hugging_face(folders):
    kl_coef, gamma, lam, low, high, value_clip, lr, critic_lr = 0.1, 0.98, 0.9, 0.1, 0.2, 0.05, 2e-3, 5e-3
    everyone = synthetic_batch()
    with float64_softmax():
        model, reference, critic = load(folders["policy"]), load(folders["reference"]), load(folders["critic"], True)
        with torch.no_grad():
            old, ref = [of(model, t)[0] for t in everyone], [of(reference, t)[0] for t in everyone]
            values = [value_of(critic, t) for t in everyone]
        advantages, returns = [], []
        for t, old_t, ref_t, value in zip(everyone, old, ref, values, strict=True):
            reward = -kl_coef * (old_t - ref_t)
            reward[-1] += t.reward
            advantages.append(gae(reward, value, gamma, lam))
            returns.append(advantages[-1] + value)
        flat = torch.cat(advantages)
        advantages = [(a - flat.mean()) / (flat.var() + 1e-8).sqrt() for a in advantages]

        def policy_loss(picked):
            losses = [surrogate(of(model, everyone[i])[0], old[i], advantages[i], low, high) for i in picked]
            return torch.cat(losses).sum() / tokens_in(everyone, picked)

        def critic_loss(picked):
            total = torch.zeros((), dtype=torch.float64)
            for i in picked:
                value = value_of(critic, everyone[i])
                near = values[i] + (value - values[i]).clamp(-value_clip, value_clip)
                squares = torch.maximum((value - returns[i]).square(), (near - returns[i]).square())
                total = total + 0.5 * squares.sum()
            return total / tokens_in(everyone, picked)

        picks = shares(everyone)
        want = {
            "policy": descend(model, policy_loss, picks, lr),
            "critic": descend(critic, critic_loss, picks, critic_lr),
        }
    sections = {
        "algo": {
            "preset": "ppo",
            "kl_coef": kl_coef,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "gamma": gamma,
            "lam": lam,
            "clip_low": low,
            "clip_high": high,
            "updates_per_step": 2,
        },
        "critic": {"clip": value_clip, "lr": critic_lr},
        "optimizer": {"lr": lr},
    }
    for metrics in [*check(sections, folders, want), *check(sections, folders, want, EACH, "each")]:
        # Both clips have an effect, and the critic has values to be wrong with.
        assert 0 < metrics["clip_fraction"] < 1 and 0 < metrics["critic/value_clip_fraction"] < 1
        assert torch.cat(values).std() > 0.3


# ── KL-Cov: a selection among all tokens of an optimizer step ────────────────


def test_layout_kl_cov_is_the_formula_on_plain_hugging_face(folders):
    share, kl_coef, lr = 0.2, 0.7, 3e-3
    everyone = synthetic_batch()
    advantage = group_advantages(everyone)
    chosen = []
    with float64_softmax():
        model = load(folders["policy"])
        with torch.no_grad():
            old = [of(model, t)[0] for t in everyone]

        def loss_of(picked):
            logp = torch.cat([of(model, everyone[i])[0] for i in picked])
            before = torch.cat([old[i] for i in picked])
            a = torch.cat([advantage[i].expand(len(old[i])) for i in picked])
            covariance = (a - a.mean()) * (logp - logp.mean()).detach()
            selected = torch.zeros_like(a)
            selected[covariance.topk(int(share * len(a))).indices] = 1.0
            chosen.append(selected)
            # In the first optimizer step logp is old_logp, and |logp - old_logp| at its lowest: no gradient.
            penalty = (logp - before).abs() if len(chosen) > 1 else 0.0
            return (-a * torch.exp(logp - before) + kl_coef * selected * penalty).sum() / len(a)

        want = descend(model, loss_of, shares(everyone), lr)
    sections = {
        "algo": {"preset": "kl_cov", "cov_ratio": share, "cov_kl_coef": kl_coef, "updates_per_step": 2},
        "optimizer": {"lr": lr},
    }
    for metrics in check(sections, folders, {"policy": want}):
        assert abs(metrics["selected_fraction"] - torch.cat(chosen).mean().item()) < EXACT
        assert min(int(selected.sum()) for selected in chosen) > 5
