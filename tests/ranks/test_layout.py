"""Law 2: the layout does not change the answer. Gradients and weights in float64, to 1e-10 relative.

One group of ranks for each world size goes through all cases; the parent compares with one rank and one micro-batch.
"""

import dataclasses
import itertools

import pytest
import torch

from spmdrl.algorithm import compose
from spmdrl.algos import AGGREGATIONS, PRESETS, kl_estimate
from spmdrl.algos.advantages import grpo
from spmdrl.policy.load import TINY
from tests.ranks.cases import (
    Rewind,
    build_policy,
    config,
    float64_softmax,
    full_weights,
    gradients_of,
    relative,
    small_model,
    synthetic_batch,
    update_once,
)
from tests.ranks.harness import run_ranks

EXACT = 1e-10
HUGE, MEDIUM, ALONE = 1 << 20, 70, 31
"""Token budgets: one micro-batch, a few, one sequence in each."""

# Every preset with every aggregation; then what else may stand in the loss, on top of one each.
VARIANTS: dict[str, dict] = {
    f"{preset}/{aggregation}": {"preset": preset, "aggregation": aggregation}
    for preset, aggregation in itertools.product(PRESETS, AGGREGATIONS)
}
VARIANTS |= {
    "grpo": {"preset": "grpo"},
    "kl in loss k3, entropy": {"preset": "grpo", "kl_coef": 0.3, "entropy_coef": 0.05},
    "kl in loss k3+": {"preset": "dr_grpo", "kl_coef": 0.3, "kl_estimator": "k3+"},
    "kl in loss k2": {"preset": "rloo", "kl_coef": 0.1, "kl_estimator": "k2"},
    "kl in reward k1": {"preset": "rloo", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "kl in reward, reinforce": {"preset": "reinforce", "kl_coef": 0.2, "kl_in": "reward"},
    "entropy": {"preset": "grpo", "aggregation": "token-mean", "entropy_coef": 0.1},
    "clip higher, dual clip": {"preset": "grpo", "clip_high": 0.05, "clip_low": 0.02, "dual_clip": 1.1},
    "old logp of the engine": {"preset": "grpo", "old_logp": "rollout", "clip_high": 0.5},
}
CROSSED = ("grpo", "kl in loss k3, entropy", "old logp of the engine")
"""Variants that go through every layout; the others through three."""


def case(variant: str, budget: int, updates: int, skip: bool) -> dict:
    algo = VARIANTS[variant] | {"updates_per_step": updates, "skip_zero_advantage": skip}
    return {"algo": algo, "policy": {"max_tokens_per_microbatch": budget}}


def cases(world_size: int) -> list[tuple[str, int, int, bool]]:
    """(variant, budget, updates, skip) that this world size runs."""
    out = []
    for variant in VARIANTS:
        if variant in CROSSED:
            out += itertools.product([variant], [HUGE, MEDIUM, ALONE], [1, 2], [False, True])
        else:
            out += [(variant, b, 2, False) for b in ([HUGE, ALONE] if world_size == 1 else [MEDIUM])]
    return out


def sweep(world, folders, todo, batch_shape):
    """(gradients of each optimizer step, weights after, metrics) of every case; tensors from rank 0 alone."""
    base = {"model": {"path": folders[0], "dtype": "float64"}, "rollout": {"temperature": 0.8}}
    cfg = config(**base, parallel={"dp_replicate": world.mesh["dp_replicate"].size()})
    rewind = Rewind(build_policy(cfg, world))
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=folders[1]))
    reference = build_policy(other, world, trainable=False)
    everyone = synthetic_batch(*batch_shape)
    out = {}
    for key in todo:
        cfg = config(**base, **case(*key))
        reference.cfg = cfg
        policy, metrics = rewind(cfg), {}
        gradients = gradients_of(
            policy,
            lambda cfg=cfg, policy=policy, metrics=metrics: metrics.update(
                update_once(cfg, world, policy, reference, everyone)
            ),
        )
        weights = full_weights(policy)
        out[key] = (gradients, weights, metrics) if world.rank == 0 else metrics
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return small_model(root / "policy", 0), small_model(root / "reference", 1)


@pytest.fixture(scope="module")
def one_rank(folders):
    return run_ranks(sweep, 1, folders, cases(1), (4, 3))[0]


def differences(got, want) -> list[str]:
    """Cases whose gradient, weights or metrics are not those of one rank and one micro-batch."""
    wrong = []
    for key, (gradients, weights, metrics) in got.items():
        variant, _, updates, _ = key
        base = want[variant, HUGE, updates, False]
        assert len(gradients) == len(base[0]) == updates
        errors = [relative(b, a) for a, b in zip(gradients, base[0], strict=True)] + [relative(base[1], weights)]
        if max(errors) > EXACT:
            wrong.append(f"{key}: {errors}")
        for name in base[2].keys() - {"microbatches"}:
            if abs(metrics[name] - base[2][name]) > 1e-9 * max(1.0, abs(base[2][name])):
                skipped = key[3] and name not in ("loss", "grad_norm", "lr")  # means over the tokens that were run
                if not skipped:
                    wrong.append(f"{key}: {name} {metrics[name]} instead of {base[2][name]}")
    return wrong


def test_layout_microbatches_and_skipping_change_nothing(one_rank):
    assert differences(one_rank, one_rank) == []
    # The cases are what they say: one, a few, one for each sequence; and nothing here is zero.
    count = {b: one_rank["grpo", b, 1, False][2]["microbatches"] for b in (HUGE, MEDIUM, ALONE)}
    assert count[HUGE] == 1 and 3 <= count[MEDIUM] <= 8 and count[ALONE] == 12
    reward, group = zip(*[(t.reward, t.position) for t in synthetic_batch(4, 3)], strict=True)
    active = int((grpo(torch.tensor(reward), torch.tensor(group)) != 0).sum())
    assert one_rank["grpo", ALONE, 1, True][2]["microbatches"] == active < 12
    norms = {v: one_rank[v, HUGE, 2, False][2]["grad_norm"] for v in VARIANTS}
    assert all(n > 1e-3 for n in norms.values()), norms
    # and the variants differ from each other, so that none is another by mistake.
    assert len({round(n, 9) for n in norms.values()}) == len(norms) - 1  # grpo stands there by its values too
    assert one_rank["clip higher, dual clip", HUGE, 2, False][2]["clip_fraction"] > 0.01


def test_layout_two_ranks_change_nothing(folders, one_rank):
    first, second = run_ranks(sweep, 2, folders, cases(2), (4, 3))
    assert differences(first, one_rank) == []
    assert all(first[k][2] == second[k] for k in first)  # metrics are alike on every rank


FOUR = [
    ("grpo", MEDIUM, 2, False),
    ("kl in loss k3, entropy", ALONE, 2, True),
    ("kl in reward k1", MEDIUM, 2, False),
    ("entropy", HUGE, 2, False),
]


@pytest.mark.parametrize("replicate", [1, 2], ids=["fsdp4", "hsdp2x2"])
def test_layout_four_ranks_change_nothing(folders, one_rank, replicate):
    got = run_ranks(sweep, 4, folders, FOUR, (4, 3), dp_replicate=replicate)
    assert differences(got[0], one_rank) == []


def test_layout_ranks_without_a_sequence_change_nothing(folders):
    """Three sequences on four ranks, one group; and two groups of which one update's share agrees in its rewards."""
    todo = [
        ("grpo", HUGE, 1, False),
        ("grpo", ALONE, 1, True),
        ("kl in loss k3, entropy", HUGE, 1, False),
        ("kl in loss k3, entropy", ALONE, 1, True),
    ]
    want = run_ranks(sweep, 1, folders, todo, (1, 3))[0]
    assert want["grpo", HUGE, 1, False][2]["grad_norm"] > 1e-3
    for replicate in (1, 2):
        got = run_ranks(sweep, 4, folders, todo, (1, 3), dp_replicate=replicate)
        assert differences(got[0], want) == []


def nothing_to_learn(world, folder):
    """All rewards agree: no rank runs a forward under skip_zero_advantage, and nothing moves."""
    cfg = config(model={"path": folder, "dtype": "float64"}, algo={"skip_zero_advantage": True, "updates_per_step": 2})
    policy = build_policy(cfg, world)
    before = full_weights(policy)
    everyone = [dataclasses.replace(t, reward=1.0) for t in synthetic_batch()]
    metrics = update_once(cfg, world, policy, None, everyone)
    after = full_weights(policy)
    return metrics, all(torch.equal(before[n], after[n]) for n in before), policy.version, policy.updates_done


def test_layout_a_step_without_signal_moves_nothing(folders):
    for n in (1, 2):
        for metrics, same, version, updates in run_ranks(nothing_to_learn, n, folders[0]):
            assert same and version == 0 and updates == 0  # so the engine has no reason to be given them anew
            assert metrics["grad_norm"] == 0 and metrics["microbatches"] == 0


# ── an independent reference: plain Hugging Face, one forward for each sequence, the formula written out ──────────────

KL, ENTROPY, LOW, HIGH, TEMPERATURE, LR = 0.05, 0.01, 0.1, 0.15, 0.7, 2e-5
REFERENCE_BATCH = (4, 3)


def plain_grpo():
    """Two optimizer steps of GRPO on the tiny policy: token-mean, PPO clip, k3 in the loss, an entropy bonus."""
    from transformers import AutoModelForCausalLM

    from spmdrl.algorithm import share_out
    from spmdrl.data.batch import from_trajectories
    from spmdrl.spmd.seeds import generator_for

    def load():
        return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64, attn_implementation="eager").train()

    model, frozen = load(), load()
    with torch.no_grad():
        for p in frozen.parameters():
            p.mul_(0.97)
    everyone = synthetic_batch(*REFERENCE_BATCH)
    rewards = torch.tensor([t.reward for t in everyone], dtype=torch.float64)
    # (r - mean) / (std + 1e-6) inside each group of three
    groups = rewards.view(-1, 3)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    assert torch.allclose(advantage, grpo(rewards, torch.tensor([t.position for t in everyone])), atol=1e-12)
    order = list(range(4))
    generator_for(3).shuffle(order)
    update = share_out(from_trajectories(everyone), 2, 4, order).seq["update"].tolist()

    def of(lm, t):
        logits = lm(input_ids=t.tokens[None]).logits[0, :-1] / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        keep = t.mask[1:]
        return log_p.gather(1, t.tokens[1:, None])[:, 0][keep], -(log_p.exp() * log_p).sum(-1)[keep]

    with torch.no_grad():
        old = [of(model, t)[0] for t in everyone]
        ref = [of(frozen, t)[0] for t in everyone]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    losses, gradients = [], []
    for share in range(2):
        picked = [i for i in range(len(everyone)) if update[i] == share]
        tokens = sum(int(everyone[i].mask.sum()) for i in picked)
        loss = torch.zeros((), dtype=torch.float64)
        for i in picked:
            logp, entropy = of(model, everyone[i])
            ratio = torch.exp(logp - old[i])
            gain = torch.minimum(advantage[i] * ratio, advantage[i] * ratio.clamp(1 - LOW, 1 + HIGH))
            d = logp - ref[i]
            k3 = (torch.exp(-d) - 1 + d).clamp(max=10)  # as verl bounds it
            assert torch.allclose(k3, kl_estimate("k3", logp, ref[i]), atol=1e-12)
            loss = loss + (-gain + KL * k3 - ENTROPY * entropy).sum() / tokens
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        norm = torch.stack([g.square().sum() for g in gradients[-1].values()]).sum().sqrt()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.5 / (norm.item() + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def ours_grpo(world, budget):
    algo = {
        "preset": "grpo",
        "aggregation": "token-mean",
        "kl_coef": KL,
        "entropy_coef": ENTROPY,
        "clip_low": LOW,
        "clip_high": HIGH,
        "updates_per_step": 2,
    }
    cfg = config(
        model={"path": "tiny", "dtype": "float64"},
        algo=algo,
        rollout={"temperature": TEMPERATURE},
        policy={"max_tokens_per_microbatch": budget},
        optimizer={"lr": LR, "clip_grad_norm": 0.5},
    )
    policy, reference = build_policy(cfg, world), build_policy(cfg, world, trainable=False)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(0.97)
    losses = []
    algorithm = compose(cfg)
    assert algorithm.aggregation == "token-mean" and algorithm.old_logp == "policy"
    seen = gradients_of(
        policy, lambda: losses.append(update_once(cfg, world, policy, reference, synthetic_batch(*REFERENCE_BATCH)))
    )
    return losses[0], seen, full_weights(policy)


def test_layout_grpo_is_the_formula_on_plain_hugging_face():
    with float64_softmax():
        losses, gradients, weights = plain_grpo()
    norms = [torch.stack([g.square().sum() for g in step.values()]).sum().sqrt().item() for step in gradients]
    scales = [min(1.0, 0.5 / (n + 1e-6)) for n in norms]
    assert min(scales) < 1  # clipping took part
    for n, budget in ((1, 4096), (2, 64)):
        for metrics, seen, after in run_ranks(ours_grpo, n, budget):
            assert abs(metrics["loss"] - sum(losses)) < EXACT
            assert abs(metrics["grad_norm"] - sum(norms) / 2) < EXACT * sum(norms)
            for want, scale, got in zip(gradients, scales, seen, strict=True):
                assert relative({k: v * scale for k, v in want.items()}, got) < EXACT
            assert relative(weights, after) < EXACT
