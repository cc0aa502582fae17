"""Lengths against the limit, filters, over-sampling and a step's numbers, of episodes of several turns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.algos.filters import FILTERS
from spmdrl.config.learning import FilterConfig
from spmdrl.config.schema import Config
from spmdrl.data.episode import Episode
from spmdrl.data.pack import from_episodes
from spmdrl.data.segment import prompt_segment
from spmdrl.rl.describe import describe
from spmdrl.rl.fill_batch import Filling, passing, rewards_by_turn
from spmdrl.rl.rollout_plan import Experience, PromptGroup, RolloutPlan
from spmdrl.rl.score import shape
from spmdrl.tracking.metrics import Metrics

ALONE: Any = SimpleNamespace(rollout_group=None, engine_count=1, engine_index=0, engine_tp_rank=0)


def played(*rewards: float, sample: int = 0, position: int = 0, answer: int = 6, final: float = 0.0) -> Episode:
    """An episode of turns of two tokens, each answered by `answer` tokens but the last, with their rewards."""
    e = Episode(position, sample, position, [prompt_segment([1, 2, 3])], finish="stop")
    for i, reward in enumerate(rewards):
        if i:
            e.add_observed([9] * answer)
        e.add_sampled([5, 6], [-0.5, -0.5], 1)
        e.add_reward(reward)
    e.reward = sum(rewards) + final
    return e


def branched() -> Episode:
    """Two turns of which the second begins with the prompt again: 3 + 2 and 3 + 4 + 2 tokens on two paths."""
    e = played(0.0)
    e.fork([1, 2, 3, 7, 7, 7, 7])
    e.add_sampled([5, 6], [-0.5, -0.5], 1)
    return e


def test_lengths_that_the_limit_counts_are_those_that_penalties_read():
    """Of 20 tokens after the prompt an episode took 2 + 6 + 2 + 6 + 2; one of a single turn took its 2."""
    cfg = Config()
    cfg.rollout.max_new_tokens, cfg.shaping.overlong_buffer = 20, 4
    batch = from_episodes([played(0.0, 0.0, 0.0), played(0.0, position=1)], turn_rewards=True)
    assert batch.sampled_per_episode.tolist() == [6, 2] and batch.generated_per_episode.tolist() == [18, 2]
    assert shape(batch, cfg, {}, None).tolist() == pytest.approx([-0.5, 0.0])
    cfg.shaping.overlong_buffer, cfg.shaping.length_penalty = 0, "linear"
    assert shape(batch, cfg, {}, None).tolist() == pytest.approx([-18 / 20, -2 / 20])
    alone = from_episodes([played(0.0)])
    assert alone.generated_per_episode.tolist() == [2], "without an environment the policy sampled all"


def test_tokens_of_a_step_count_what_branches_share_once():
    batch = from_episodes([branched(), played(0.0, position=1)], turn_rewards=True)
    assert batch.n_tokens == (5 + 9) + 5 and batch.n_distinct == (3 + 2 + 4 + 2) + 5
    assert batch.generated_per_episode.tolist() == [8, 2]
    stats = Metrics()
    describe(stats, batch)
    assert stats.reduce(lambda x, how: None)["tokens"] == batch.n_distinct


@pytest.mark.parametrize(
    ("a", "b", "by_turn", "kept"),
    [
        ((1.0, 0.0), (0.0, 1.0), True, True),
        ((1.0, 0.0), (0.0, 1.0), False, False),
        ((1.0, 0.0), (1.0, 0.0), True, False),
        ((0.1, 0.2, 0.0), (0.1, 0.2, 0.0), True, False),
        ((1.0,), (0.0,), False, True),
    ],
)
def test_a_group_whose_turns_differ_is_mixed_for_an_advantage_that_compares_turns(a, b, by_turn, kept):
    group = [played(*a, sample=0), played(*b, sample=1)]
    assert (passing(group, FILTERS["mixed"], FilterConfig(keep="mixed"), by_turn) == group) is kept
    assert rewards_by_turn(played(0.1, 0.2, final=0.5)) == {0: 0.1, 1: 0.7}


def group_of(*finishes: str, greedy: str = "") -> PromptGroup:
    episodes = [played(0.0, sample=i) for i in range(len(finishes) + bool(greedy))]
    for episode, finish in zip(episodes, [*finishes, *([greedy] if greedy else [])], strict=True):
        episode.finish = finish
    return PromptGroup(0, None, 0, episodes)  # type: ignore[arg-type]


def test_over_sampling_does_not_count_groups_that_failed():
    def counts(group: PromptGroup, least: int, greedy: bool = False) -> bool:
        return RolloutPlan("p", [], 3, (0,), 0, 8, 1.0, least=least, greedy=greedy).counts(group)

    assert counts(group_of("stop", "length", "abort"), 2)
    assert not counts(group_of("stop", "abort", "abort"), 2) and counts(group_of("stop", "abort", "abort"), 1)
    assert not counts(group_of("abort", "abort", "abort"), 1)
    assert not counts(group_of("stop", "stop", "stop", greedy="abort"), 1, greedy=True)


def test_failures_are_those_of_the_episodes_that_the_step_leaves_out():
    """A rollout hears of a failure in a group that goes on in the next step: it is that step's."""
    cfg = Config()
    filling = Filling(cfg, ALONE, None, 0, [])
    failed, fine = played(0.0), played(1.0, sample=1)
    failed.finish, failed.ungraded, failed.reward = "abort", True, float("nan")
    one, none = (RolloutPlan("p", [None] * n, 2, (0,), 0, 8, 1.0) for n in (1, 0))  # type: ignore[list-item]
    filling.take(one, Experience([], 1, counts={"failures": 1.0}))
    assert filling.done.counts["failures"] == 0
    filling.take(RolloutPlan("p", [], 2, (0,), 0, 8, 1.0), Experience([failed, fine], counts={"failures": 0.0}))
    assert filling.done.counts["failures"] == 1 == sum(torch.tensor(filling.rewards).isnan()).item()
