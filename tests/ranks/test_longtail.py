"""Long tails: over-sampling cuts the slowest; what was cut goes on, with the weight version and logp of each token."""

import json
from collections import Counter
from pathlib import Path

import pytest

from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.mixture import drawn_indices
from spmdrl.data.prompts import Prompt
from spmdrl.rl.build import build_run
from spmdrl.rl.rollout_plan import Experience, RolloutPlan, shares
from spmdrl.rl.sampler import Sampler
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import config
from tests.ranks.harness import run_ranks

STEPS = 4


def tail(folder: str, **rollout):
    """Settings for responses of 1 to 24 tokens: the tiny policy at a temperature at which it ends by chance."""
    return config(
        run={"dir": folder, "steps": STEPS, "seed": 1},
        model={"path": "tiny", "dtype": "float64"},
        # Versions move and weights stay, so that the trainer can check the logp of tokens of every version.
        optimizer={"lr": 0.0, "clip_grad_norm": 1.0},
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 3,
            "max_new_tokens": 24,
            "max_prompt_tokens": 16,
            "temperature": 3.0,
            "assignment": "static",
        }
        | rollout,
        reward={"function": str(Path(__file__).with_name("length_reward.py"))},
        algo={"old_logp": "policy"},
        eval={"every": 0},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
        data={"limit": 64},
    )


def trained(world, folder, rollout):
    """Rows of each step on this rank (position, prompt, sample, tokens, versions, finish), the prompts that it carries
    on, and those that all ranks drew."""
    run = build_run(Session(tail(folder, **rollout), world, Timer()))
    seen, experience = [], run.experience

    def watched(step):
        first = run.sampler.draws
        done = experience(step)
        drawn = drawn_indices(len(run.sampler.prompts), first, done.drawn, run.cfg.run.seed)
        rows = [
            (t.position, t.prompt, t.sample, t.tokens.tolist(), t.versions[t.mask].tolist(), t.finish)
            for t in done.episodes
        ]
        carried = [group.prompt.index for group in done.carried]
        seen.append((rows, carried, [run.sampler.prompts.prompts[i].index for i in drawn]))
        return done

    run.experience = watched
    train(run)
    run.close()
    assert run.state.draws == run.sampler.draws, "a resume goes on where the line is"
    return seen


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def numbers(folder, name: str) -> list[int]:
    return [int(row[f"rollout/{name}"]) for row in metrics(folder)]


def check_whole(seen, left_out: list[int]) -> None:
    """Checks that every step learns from whole groups, of other prompts than all steps before. Each prompt drawn or
    carried into a step is learnt from, carried on, or among its `left_out`: none is lost, none is there twice.
    """
    learnt, carried = [], []
    for step in range(STEPS):
        rows = [row for rank in seen for row in rank[step][0]]
        assert sorted((p, s) for p, _, s, *_ in rows) == [(p, s) for p in range(4) for s in range(3)]
        assert all(finish in ("stop", "length") for *_, finish in rows)
        there = Counter(carried + seen[0][step][2])
        assert all(rank[step][2] == seen[0][step][2] for rank in seen), "drawn alike"
        carried = [prompt for rank in seen for prompt in rank[step][1]]
        here = sorted({prompt for _, prompt, *_ in rows})
        learnt += here
        rest = Counter(here + carried)
        assert rest <= there and (there - rest).total() == left_out[step], step
    assert len(learnt) == len(set(learnt)) == 4 * STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_slowest_are_cut_and_the_step_is_whole(ranks, tmp_path):
    # Three groups at a time on each of two engines, which are not equally quick: some prompts are passed over.
    rollout = {"oversample": 3.0, "max_sequences": 9} if ranks == 2 else {"oversample": 2.0}
    seen = run_ranks(trained, ranks, str(tmp_path / "run"), rollout)
    cut, surplus, unbegun = (numbers(tmp_path / "run", f"{name}_prompts") for name in ("cut", "surplus", "unbegun"))
    check_whole(seen, [sum(step) for step in zip(cut, surplus, unbegun, strict=True)])
    assert not any(rank[step][1] for rank in seen for step in range(STEPS)), "nothing is carried unless asked for"
    assert sum(cut) >= STEPS
    if ranks == 2:
        assert sum(unbegun) > 0
        again = run_ranks(trained, ranks, str(tmp_path / "again"), rollout)
        assert seen == again, "a fixed assignment is bit-exact"
        return
    whole = run_ranks(trained, ranks, str(tmp_path / "whole"), {})
    mean = [sum(len(r[4]) for rank in s for step in rank for r in step[0]) for s in (seen, whole)]
    assert mean[0] < mean[1], "what ends first is shorter"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_cut_goes_on_with_its_versions_and_logp(ranks, tmp_path):
    rollout = {"oversample": 2.0, "partial_steps": 1}
    seen = run_ranks(trained, ranks, str(tmp_path / "run"), rollout)
    rows = [row for rank in seen for step in rank for row in step[0]]
    mixed = [row for row in rows if len(set(row[4])) > 1]
    assert mixed and all(row[4] == sorted(row[4]) for row in mixed), "tokens of an older version come first"
    assert max(max(row[4]) - min(row[4]) for row in rows) == 1, "waited for after one step"
    assert all(len(row[4]) <= 24 for row in rows)
    for step in range(STEPS):
        newest = {p: 0 for p in range(4)}
        for position, _, _, _, versions, _ in (row for rank in seen for row in rank[step][0]):
            newest[position] = max(newest[position], *versions)
        assert set(newest.values()) == {step}, "the last sample of a group ends by the weights of the step"
    check_whole(seen, numbers(tmp_path / "run", "surplus_prompts"))
    assert all(count > 0 for count in numbers(tmp_path / "run", "cut_prompts"))
    # Every token's logp is what the (unmoved) weights say of it, also across the cut.
    for row in metrics(tmp_path / "run"):
        assert row["logp_diff/max"] < 1e-6, row
    stale = [sum(v < step for rank in seen for row in rank[step][0] for v in row[4]) for step in range(STEPS)]
    assert stale == numbers(tmp_path / "run", "stale_tokens") and sum(stale) > 0


@pytest.mark.parametrize(("assignment", "sequences"), [("queue", 3), ("static", 3), ("static", 64)])
def test_lockstep_what_is_drawn_is_learnt_or_carried(assignment, sequences, tmp_path):
    """With 3 sequences an engine, enough is done before all prompts begin; with 64 all prompts begin at once."""
    rollout = {"oversample": 2.0, "partial_steps": 3, "assignment": assignment, "max_sequences": sequences}
    seen = run_ranks(trained, 2, str(tmp_path / "run"), rollout)
    cut, surplus = (numbers(tmp_path / "run", f"{name}_prompts") for name in ("cut", "surplus"))
    check_whole(seen, surplus)
    assert numbers(tmp_path / "run", "unbegun_prompts") == [0] * STEPS
    assert cut == [sum(len(rank[step][1]) for rank in seen) for step in range(STEPS)]
    if sequences == 64:
        # All eight run: what is carried takes the place of prompts, and each engine stops at its share of four.
        assert [c + s for c, s in zip(cut, surplus, strict=True)] == [4] * STEPS
        assert sum(cut[1:]) > sum(surplus[1:]), "also in the steps that go on with groups"


class Uneven(Sampler):
    """Engine 0 begins all of its prompts, of which 6 is cut, and engine 1 begins only place 1; nothing is sampled."""

    def __init__(self, cfg, world, assignment: str):
        self.cfg, self.world, self.keep, self.assignment, self.asked = cfg, world, None, assignment, []

    def plan(self, step: int, first: int, prompts: int, version: int, before: int = 0) -> RolloutPlan:
        blank = [Prompt(i, [5], "", "", {}, "") for i in range(prompts)]
        return RolloutPlan("r", blank, 1, (0, 0), 0, 8, 1.0, assignment=self.assignment, first_position=first)

    def rollout(self, plan: RolloutPlan) -> Experience:
        carried = [g.position for g in plan.carried]
        self.asked.append((plan.first_position, len(plan.prompts), plan.carried_by, carried))
        if self.world.rank:
            return Experience([one(plan, 1)], 2, list(plan.carried))
        cut = [*plan.carried, plan.group(6)] if len(plan.prompts) > 6 else list(plan.carried)
        return Experience([one(plan, place) for place in (0, 2, 4)], 7 if len(plan.prompts) > 6 else 5, cut)


def uneven(world, assignment: str, partial: int):
    """Makes two steps of an uneven sampler.

    These are its requests, as (first position, prompts, groups that each engine carries, those of this one); how many
    were drawn; (cut, unbegun) of each step.
    """
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 1, "oversample": 2.0, "partial_steps": partial}
    sampler = Uneven(config(rollout=rollout), world, assignment)
    draws, carried, told = 0, [], []
    for step in range(2):
        done = sampler.fill_batch(step, draws, 0, carried)
        draws, carried = draws + done.drawn, done.carried
        reduced = done.stats.reduce(lambda x, op: all_reduce(x, op, world.rollout_group))
        told.append((reduced["rollout/cut_prompts"], reduced["rollout/unbegun_prompts"]))
    return sampler.asked, draws, told


def one(plan: RolloutPlan, place: int) -> Episode:
    position = plan.first_position + place
    made = Episode(position, 0, position, [prompt_segment([5])], "stop")
    made.add_sampled([6], [-1.0], 0)
    return made


def test_the_line_goes_on_after_the_last_prompt_that_was_begun():
    (first, draws, told), (second, *same) = run_ranks(uneven, 2, "static", 1)
    assert same == [draws, told] and draws == 7 + 5
    assert first == [(0, 8, [0, 0], []), (7, 5, [1, 2], [6])]
    assert second == [(0, 8, [0, 0], []), (7, 5, [1, 2], [3, 5])], "3 and 5 are this engine's, and wait for it"
    assert told == [(3, 0), (4, 0)], "6, 3 and 5; and place 3 of the five"
    (_, draws, told), _ = run_ranks(uneven, 2, "static", 0)
    assert draws == 7 + 7 and told == [(1, 2), (1, 2)], "not carried on, but counted"


def test_shares_of_a_fixed_assignment_are_what_is_wanted():
    assert shares(32, [24, 24]) == [16, 16] and shares(32, [20, 28]) == [13, 19]
    for groups in ([0, 5, 1, 9], [3, 3, 3], [7], [0, 40]):
        for enough in range(1, sum(groups) + 3):
            got = shares(enough, groups)
            assert sum(got) == min(enough, sum(groups))
            exact = [min(enough, sum(groups)) * n / sum(groups) for n in groups]
            assert all(abs(a - b) < 1 and a <= n for a, b, n in zip(got, exact, groups, strict=True))
