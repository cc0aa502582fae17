"""Law 2 for credit over turns: a step on episodes that fork is the formula on plain Hugging Face models, in any layout.

Advantages come from the recursion of tests/unit/test_turn_credit.py; gradients are compared in float64, to 1e-10.
"""

import pytest
import torch

from spmdrl.config.schema import OptimizerConfig
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.pack import from_episodes
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.rl.compose import compose
from spmdrl.spmd.seeds import generator_for
from tests.ranks.cases import (
    VOCAB,
    build_policy,
    config,
    float64_softmax,
    gradients_of_all,
    packed,
    relative,
    small_model,
    update_models,
)
from tests.ranks.harness import run_ranks
from tests.ranks.test_layout import EXACT, TEMPERATURE, Learnt, descend, load, of, shares, value_of
from tests.unit.test_turn_credit import TREE_REFERENCES, Tree

LAYOUTS = ((1, 4096), (1, 64), (2, 64))
"""Ranks, token budget."""
LR, CRITIC_LR = 2e-3, 5e-3
METHODS = {
    "turn_rloo": {"gamma": 0.9},
    "turn_gae": {"gamma": 0.9, "lam": 0.7, "critic_lam": 0.2},
    "gigpo": {"gamma": 0.8, "step_weight": 0.5},
    "remax": {},
}


def episodes(prompts: int = 4, samples: int = 3) -> list[Episode]:
    """Random tokens in one to four turns, with a tool's tokens between them."""
    out = []
    for position in range(prompts):
        rng = generator_for(17, position)
        prompt = [rng.randrange(VOCAB) for _ in range(8)]
        for sample in range(samples):
            e = Episode(position, sample, position, [prompt_segment(prompt)], "stop", float(rng.randrange(5)) / 4)
            e.baseline = 0.5
            for turn in range(1 + rng.randrange(4)):
                if turn:
                    e.add_observed([rng.randrange(VOCAB) for _ in range(1 + rng.randrange(2))], rng.randrange(2))
                made = [rng.randrange(VOCAB) for _ in range(1 + rng.randrange(3))]
                e.add_sampled(made, [-rng.uniform(2.0, 5.0) for _ in made], 0)
            out.append(e)
    return out


def parent(e: Episode, turn: int) -> int:
    """Every episode has a tree of its own: a later turn follows any earlier one."""
    return generator_for(23, e.position, e.sample, turn).randrange(turn) if turn else -1


def fell(e: Episode, turn: int) -> float:
    """Reward of a turn; the rest of the episode's falls at its end."""
    return generator_for(29, e.position, e.sample, turn).randrange(4) / 4


def last_tokens(e: Episode) -> dict[int, int]:
    """Place of each turn's last sampled token."""
    ends = torch.tensor([len(s) for s in e.segments]).cumsum(0).tolist()
    return {s.turn: end - 1 for s, end in zip(e.segments, ends, strict=True) if s.sampled}


def with_trees(mine: list[Episode], parts, experts_width: int):
    """Packs episodes with the columns of trees and of rewards by turn."""
    batch = from_episodes(mine, parts, experts_width, turns=True)
    mine = sorted(mine, key=lambda e: (e.position, e.sample))
    none = [torch.zeros(0)]
    rows = [torch.tensor([parent(e, s.turn) for s in e.segments for _ in range(len(s))]) for e in mine]
    batch.token["parent"] = torch.cat([*none, *rows]).long()
    rewards = [torch.zeros(len(e), dtype=torch.float64) for e in mine]
    for e, row in zip(mine, rewards, strict=True):
        for turn, place in last_tokens(e).items():
            row[place] = fell(e, turn)
    batch.token["turn_reward"] = torch.cat([*none, *rewards]).double()
    return batch


def ours(world, name: str, folders: dict, budget: int) -> tuple[dict, dict[str, list]]:
    """Makes a step by the library; returns its metrics and each model's gradients."""
    cfg = config(
        model={"path": folders["policy"], "dtype": "float64"},
        rollout={"temperature": TEMPERATURE},
        policy={"max_tokens_per_microbatch": budget},
        algo={"preset": "rloo", "advantage": name, "updates_per_step": 2} | METHODS[name],
        critic={"clip": None, "lr": CRITIC_LR},
        optimizer={"lr": LR},
    )
    algo = compose(cfg)
    models = Models(build_policy(cfg, world))
    if "critic" in algo.needs:
        own = OptimizerConfig(lr=CRITIC_LR, clip_grad_norm=0.0)
        models.critic = FsdpPolicy(cfg, world, 100, True, folders["critic"], "value", own)
    everyone, metrics = episodes(), {}
    batch = packed(cfg, world, everyone, make=with_trees)
    trained = {"policy": models.policy, **models.trained()}
    seen = gradients_of_all(trained, lambda: metrics.update(update_models(cfg, world, models, everyone, batch)))
    return metrics, seen


def formula(name: str, folders: dict) -> dict[str, Learnt]:
    """The same step: one forward for each episode, credit by recursion, AdamW of torch."""
    everyone, want = episodes(), {}
    with float64_softmax():
        model, critic = load(folders["policy"]), load(folders["critic"], True)
        seqs = []
        for e in everyone:
            turn = e.along(lambda s: torch.full((len(s),), s.turn))
            rewards = torch.zeros(len(e), dtype=torch.float64)
            for k, place in last_tokens(e).items():
                rewards[place] = fell(e, k)
            rewards[last_tokens(e)[e.turns - 1]] += e.reward - rewards.sum()
            values = torch.zeros(len(e), dtype=torch.float64)
            values[e.mask] = value_of(critic, e).detach()
            columns = {"turn": turn, "parent": torch.tensor([parent(e, k) for k in turn.tolist()])}
            columns |= {"state": e.along(lambda s: torch.full((len(s),), s.state)), "mask": e.mask}
            seqs.append(columns | {"rewards": rewards, "values": values, "group": e.position, "baseline": e.baseline})
        both = TREE_REFERENCES[name](seqs, [Tree(s) for s in seqs], **METHODS[name])
        advantages, returns = ([torch.tensor(row, dtype=torch.float64) for row in rows] for rows in both)
        with torch.no_grad():
            old = [of(model, e)[0] for e in everyone]

        def policy_loss(picked):
            return sum(-(advantages[i] * of(model, everyone[i])[0]).sum() for i in picked) / len(picked)

        def critic_loss(picked):
            squares = [(value_of(critic, everyone[i]) - returns[i]).square() for i in picked]
            return 0.5 * torch.cat(squares).sum() / sum(len(old[i]) for i in picked)

        picks = shares(everyone)
        want["policy"] = descend(model, policy_loss, picks, LR)
        if name == "turn_gae":
            want["critic"] = descend(critic, critic_loss, picks, CRITIC_LR)
    return want


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {n: small_model(root / n, i, n == "critic") for i, n in enumerate(("policy", "critic"))}


@pytest.mark.parametrize("name", METHODS)
def test_layout_credit_over_trees_is_the_formula_on_plain_hugging_face(name, folders):
    want = formula(name, folders)
    assert {len({parent(e, k) for k in range(e.turns)}) for e in episodes()} >= {1, 2, 3}, "chains and forks"
    for ranks, budget in LAYOUTS:
        for metrics, got in run_ranks(ours, ranks, name, folders, budget):
            assert got.keys() == want.keys()
            for model, learnt in want.items():
                prefix = "" if model == "policy" else f"{model}/"
                assert abs(metrics[f"{prefix}loss"] - sum(learnt.losses) / 2) < EXACT
                for a, b in zip(learnt.gradients, got[model], strict=True):
                    assert relative(a, b) < EXACT, (name, model, ranks, budget)
