"""The loop of a rollout with an engine and environments that do as they are told: what is begun, cut and left.

Both are fakes, as failures at a chosen moment are what is tested; real ones are in tests/ranks/test_environment.py.
"""

import random
import time
from types import SimpleNamespace

import pytest

from spmdrl.config.schema import Config
from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt
from spmdrl.data.segment import prompt_segment
from spmdrl.engines.engine import Completion
from spmdrl.rewards.base import Reward
from spmdrl.rl import evaluation
from spmdrl.rl.environment import Environment, Observation, place_of
from spmdrl.rl.grade import Grading
from spmdrl.rl.rollout import Rollout
from spmdrl.rl.rollout_plan import Experience, RolloutPlan
from spmdrl.tracking.metrics import Timer

WORLD = SimpleNamespace(engine_count=1, engine_index=0, engine_tp_rank=0, engine_group=None, store=None, device="cpu")


class Engine:
    """Answers every request at the next poll with one token."""

    capacity, version = 8, 0

    def __init__(self):
        self.asked = []

    def submit(self, request):
        self.asked.append(request)

    def poll(self):
        done, self.asked = self.asked, []
        return [Completion(request.key, [5], [0.0], "stop", 0) for request in done]

    def abort(self, keys):
        return []


class Ones:
    """A grader whose reward is always 1."""

    name, wants_groups, on_engine, pending = "ones", False, False, 0

    def __init__(self):
        self.done = []

    def submit(self, key, graded):
        self.done.append((key, Reward(1.0)))

    def poll(self):
        done, self.done = self.done, []
        return done

    def drain(self, stop):
        return self.poll()


def rollout(environment, prompts: int = 6, **settings) -> Experience:
    """Runs a rollout of a few prompts."""
    plan = RolloutPlan(
        "test",
        [Prompt(i, [1, 2], "b", "", {}, "a") for i in range(prompts)],
        4,
        (0, 0),
        0,
        8,
        1.0,
        assignment="static",
        **settings,
    )
    tokenizer = SimpleNamespace(decode=lambda *words, **more: "x")
    return Rollout(plan, Engine(), Grading(Ones(), tokenizer, True), WORLD, environment).run(Timer())


class Fails(Environment):
    """Some prompts cannot be opened."""

    def __init__(self, bad: set[int]):
        super().__init__()
        self.bad = bad

    def open(self, plan, group, episode):
        if group.prompt.index in self.bad:
            self.ready.append((place_of(episode), Observation(over="abort", failure="reset raised")))
        else:
            super().open(plan, group, episode)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("bad", [set(), {0}, {0, 1, 2}, {2, 3}, {0, 1, 2, 3, 4, 5}])
def test_prompts_after_those_that_fail_at_once_are_begun(bad, in_order):
    done = rollout(Fails(bad), in_order=in_order)
    assert done.drawn == 6
    assert {e.prompt for e in done.episodes if e.finish == "stop"} == set(range(6)) - bad


def test_groups_that_failed_are_not_enough():
    done = rollout(Fails({0, 1}), enough=3, least=2)
    assert len({e.prompt for e in done.episodes if e.finish == "stop"}) >= 3


class Counted(Environment):
    """Notes how many episodes are open at most."""

    def __init__(self, most_open: int):
        super().__init__()
        self.most_open, self.open_now, self.most = most_open, 0, 0

    def open(self, plan, group, episode):
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        super().open(plan, group, episode)

    def answer(self, plan, group, episode, finish):
        self.open_now -= 1
        super().answer(plan, group, episode, finish)


@pytest.mark.parametrize("most_open, seen", [(0, 8), (7, 4), (4, 4), (1, 4), (100, 8)])
def test_no_more_environments_are_open_than_allowed_but_one_group(most_open, seen):
    counted = Counted(most_open)
    assert len(rollout(counted).episodes) == 24 and counted.most == seen


class Slow(Environment):
    """The last prompt's responses are answered after an hour."""

    def __init__(self):
        super().__init__()
        self.left = []

    def answer(self, plan, group, episode, finish):
        if group.prompt.index < 5:
            super().answer(plan, group, episode, finish)

    def poll(self, wait=0.0):
        time.sleep(0 if self.ready else wait)
        return super().poll()

    def leave(self, episodes, keep):
        self.left.append(([place_of(e) for e in episodes], keep))


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_cut_does_not_wait_for_the_environment(keep):
    slow = Slow()
    began = time.monotonic()
    done = rollout(slow, enough=5, keeps_cut=keep)
    assert time.monotonic() - began < 20 and len(done.episodes) == 20
    (group,) = done.carried
    assert [e.unanswered for e in group.episodes] == ["stop"] * 4
    assert slow.left == [([(5, sample) for sample in range(4)], keep)]


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
def test_a_rollout_that_waits_for_environments_may_be_abandoned(in_order):
    began = time.monotonic()
    done = rollout(Slow(), in_order=in_order, may_end=lambda: time.monotonic() - began > 0.5)
    assert done.abandoned and time.monotonic() - began < 20


class Shuffled(Environment):
    """Asks for a second turn, and answers in pieces, in an order that depends on the seed, as processes do."""

    def __init__(self, seed: int):
        super().__init__()
        self.draw = random.Random(seed)

    def reply(self, prompt, episode):
        return None if len(episode.segments) > 2 else SECOND

    def poll(self, wait=0.0):
        self.draw.shuffle(self.ready)
        count = self.draw.randint(0, len(self.ready))
        now, self.ready = self.ready[:count], self.ready[count:]
        return now


SECOND = Observation([3])


def test_an_engine_gets_requests_in_one_order_however_environments_answer(monkeypatch):
    """Else its batches, and with them the last bits of what it samples, go by the clock."""
    orders = []

    class Noted(Engine):
        def poll(self):
            orders[-1].append([(request.key, len(request.prompt)) for request in self.asked])
            return super().poll()

    monkeypatch.setattr(f"{__name__}.Engine", Noted)
    for seed in range(4):
        orders.append([])
        assert len(rollout(Shuffled(seed), in_order=True).episodes) == 24
    assert all(order == orders[0] for order in orders)
    assert {length for step in orders[0] for _, length in step} == {2, 4}, "first turns and second ones"


@pytest.mark.parametrize(("polls", "whole"), [(0, 0), (1, 2), (2, 4), (99, 6)])
@pytest.mark.parametrize("keeps", [False, True])
def test_an_evaluation_that_is_cut_short_keeps_the_prompts_that_are_graded(polls, whole, keeps):
    """Two prompts of four samples fill the engine and end at each poll."""
    asked = []

    def may_end() -> bool:
        asked.append(1)
        return len(asked) > polls

    done = rollout(Environment(), may_end=may_end, keeps_graded=keeps)
    assert done.abandoned is (polls < 6 and len(asked) > polls) and done.carried == []
    ended = {e.prompt for e in done.episodes}
    assert len(done.episodes) == 4 * len(ended) and all(e.reward == 1 for e in done.episodes)
    if keeps:
        assert len(ended) >= whole
    elif done.abandoned:
        assert not done.episodes


@pytest.mark.parametrize(
    ("parts", "accuracy"),
    [
        ([{}] * 4, 0.5),
        ([{"format": 1.0}] * 4, 0.5),
        ([{"acc": 1.0}] * 3 + [{"acc": 0.0}], 0.75),
        ([{"acc": 0.0}] * 4, 0),
    ],
)
def test_an_evaluation_counts_the_part_acc_or_a_score_that_rounding_leaves_below_1(parts, accuracy):
    scores = [0.6 + 0.3 + 0.1, 0.5, 1.0, 0.0]
    assert scores[0] < 1.0
    done = [Episode(i, 0, i, [prompt_segment([1])], "stop", score) for i, score in enumerate(scores)]
    for episode, named in zip(done, parts, strict=True):
        episode.parts = named
    plan = RolloutPlan("eval", [Prompt(i, [1], "b", "", {}, "a") for i in range(4)], 1, (0,), 0, 8, 1.0)
    sampler = SimpleNamespace(
        rollout=lambda *_: Experience(done, 4),
        environment=None,
        cfg=Config(),
        world=SimpleNamespace(rollout_group=None),
    )
    numbers, *_ = evaluation.evaluate(plan, sampler)  # type: ignore[arg-type]
    assert numbers["eval/accuracy"] == accuracy and numbers["eval/score"] == pytest.approx(0.625)


@pytest.mark.parametrize("ungraded", ["", "no sandbox"])
def test_a_logp_that_is_not_finite_stops_the_run_whether_its_sample_is_graded_or_not(ungraded):
    plan = RolloutPlan("test", [Prompt(0, [1, 2], "b", "", {}, "a")], 1, (0, 0), 0, 8, 1.0)
    grading, group = Grading(Ones(), None, True), plan.group(0)
    group.episodes[0].segments.append(prompt_segment([1, 2]))
    group.episodes[0].add_sampled([5], [float("nan")], 0)
    grading.rewards[0, 0] = Reward(1.0, ungraded=ungraded)
    with pytest.raises(ValueError, match="a logp that is not finite for prompt 0, sample 0, at weight version 0"):
        grading.graded(group, plan)
    plan.bad_sample = "skip"
    (episode,) = grading.graded(group, plan)
    assert episode.reward != episode.reward and episode.ungraded is bool(ungraded)
