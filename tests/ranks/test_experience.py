"""Dynamic sampling, replay and resampling: what a step learns from does not depend on how many ranks sampled it."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from spmdrl.algos.filters import mixed
from spmdrl.config.learning import FilterConfig
from spmdrl.data.episode import Episode, episode_of
from spmdrl.data.pack import from_episodes
from spmdrl.data.step_batch import ReplayBuffer
from spmdrl.rl.rollout_plan import Experience, RolloutPlan
from spmdrl.rl.sampler import Sampler
from spmdrl.spmd.exchange import all_gather_rows
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import generator_for
from tests.ranks.cases import config
from tests.ranks.harness import RankError, run_ranks

WANTED, SAMPLES = 4, 3


def sample(prompt: int, sample: int, position: int, salt: int = 0) -> Episode:
    """An episode that differs for every prompt and sample; every third prompt agrees in its rewards."""
    rng = generator_for(prompt, sample, salt)
    length = 2 + rng.randrange(4)
    reward = 1.0 if prompt % 3 == 0 else float(sample + rng.randrange(2))
    mask = torch.tensor([False] + [True] * (length - 1))
    tokens = torch.tensor([rng.randrange(99) for _ in range(length)])
    return episode_of(prompt, sample, position, tokens, mask, mask * -1.0, 0, reward=reward)


class Made(Sampler):
    """Engines that take every prompt in turn; their samples are made up."""

    def __init__(self, cfg, world, keep):
        self.cfg, self.world, self.keep = cfg, world, keep

    def plan(self, step: int, first: int, prompts: int, version: int, before: int = 0) -> RolloutPlan:
        return RolloutPlan(str(before), [None] * prompts, SAMPLES, (0,), 0, 8, 1.0, first_position=first)

    def rollout(self, plan: RolloutPlan) -> Experience:
        mine = [p for p in range(len(plan.prompts)) if p % self.world.size == self.world.rank]
        place = plan.first_position
        return Experience([sample(place + p, s, place + p) for p in mine for s in range(SAMPLES)])


def filled(world, cfg: FilterConfig, keep: bool):
    """Prompts that a step got, as (position, prompt, sample) rows over all ranks, and the numbers it reports."""
    run = config(filter=dataclasses.asdict(cfg), rollout={"prompts_per_step": WANTED, "samples_per_prompt": SAMPLES})
    done = Made(run, world, mixed if keep else None).fill_batch(0, 0, 0, [])
    rows = torch.tensor([[t.position, t.prompt, t.sample] for t in done.episodes]).reshape(-1, 3)
    everyone = torch.cat(all_gather_rows(rows, world.host_group))
    numbers = done.stats.reduce(lambda x, op: dist.all_reduce(x, group=world.host_group) if op == "sum" else None)
    return sorted(map(tuple, everyone.tolist())), done.drawn // WANTED, numbers


def test_lockstep_a_step_is_filled_alike_on_any_number_of_ranks():
    cfg = FilterConfig(keep="mixed", max_rounds=3)
    (want, rounds, numbers), *_ = run_ranks(filled, 1, cfg, True)
    # Prompts 0, 3, 6 agree: of the first four two are kept, of the next four three; one is over.
    assert want == [(i, prompt, s) for i, prompt in enumerate((1, 2, 4, 5)) for s in range(SAMPLES)]
    assert rounds == 2
    assert numbers == {
        "filter/rounds": 2,
        "filter/accepted": 5 / 8,
        "filter/dropped_prompts": 3,
        "filter/surplus_prompts": 1,
        "reward/ungraded": 0,
        # Of all 24 that were sampled, the dropped ones and the surplus too.
        "reward/mean": pytest.approx(sum(sample(p, s, p).reward for p in range(8) for s in range(SAMPLES)) / 24),
    }
    for n in (2, 3):
        assert run_ranks(filled, n, cfg, True) == [(want, rounds, numbers)] * n
    (unfiltered, rounds, numbers), *_ = run_ranks(filled, 1, FilterConfig(), False)
    assert [row[:2] for row in unfiltered[::SAMPLES]] == [(i, i) for i in range(WANTED)] and rounds == 1
    assert numbers == {
        "reward/mean": pytest.approx(sum(sample(p, s, p).reward for p in range(4) for s in range(SAMPLES)) / 12),
        "reward/ungraded": 0,
    }


def test_lockstep_a_step_that_cannot_fill_ends_on_every_rank_alike():
    with pytest.raises(RankError, match="mixed kept 2 of 4 prompts.*50.0%.*--filter.max-rounds") as error:
        run_ranks(filled, 2, FilterConfig(keep="mixed", max_rounds=1), True)
    assert "rank 0 of 2" in str(error.value) and "rank 1 of 2" in str(error.value)


def replayed(world, cfg: FilterConfig, steps: int):
    """Returns each step's data of all ranks, as sorted rows (position, prompt, sample, first token)."""
    replay, out = ReplayBuffer(cfg, WANTED), []
    group = dist.group.WORLD if world.size > 1 else None
    for step in range(steps):
        mine = [p for p in range(WANTED) if p % world.size == world.rank]
        batch = from_episodes([sample(7 * step + p, s, p, step) for p in mine for s in range(SAMPLES)])
        mixed_in = replay.mix(batch, 5, step, Peers(group, world.device))
        first = mixed_in.token["tokens"][mixed_in.cu_seqlens[:-1].long()]
        rows = torch.stack([mixed_in.seq["position"], mixed_in.seq["prompt"], mixed_in.seq["sample"], first], 1)
        everyone = torch.cat(all_gather_rows(rows, group))
        assert (mixed_in.lengths > 0).all() and len(mixed_in.token["mask"]) == mixed_in.n_tokens
        out.append(sorted(map(tuple, everyone.tolist())))
    return out


CONFIGS = {
    "best_random": FilterConfig(resample="best_random"),
    "pow": FilterConfig(resample="pow"),
    "replay": FilterConfig(replay_steps=2),
    "both": FilterConfig(resample="best_worst", replay_steps=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_resampling_and_replay_draw_alike_on_any_number_of_ranks(name):
    cfg = CONFIGS[name]
    want = run_ranks(replayed, 1, cfg, 4)[0]
    for n in (2, 3):
        assert all(got == want for got in run_ranks(replayed, n, cfg, 4))
    assert all(len(rows) == WANTED * SAMPLES for rows in want)
    assert any(len(set(rows)) < len(rows) for rows in want), "drawn with replacement"
    ages = {row[0] // WANTED for row in want[3]}
    assert ages == ({0} if not cfg.replay_steps else set(range(cfg.replay_steps + 1)))
    for step, rows in enumerate(want):
        for position, prompt, index, _ in rows:
            age, place = divmod(position, WANTED)
            assert prompt == 7 * (step - age) + place, "an old sequence keeps its prompt and says its age"
            assert 0 <= index < SAMPLES


def test_without_a_filter_a_batch_passes_as_it_is():
    batch = from_episodes([sample(p, s, p) for p in range(WANTED) for s in range(SAMPLES)])
    assert ReplayBuffer(FilterConfig(), WANTED).mix(batch, 0, 0, Peers(None, torch.device("cpu"))) is batch
    assert dataclasses.replace(FilterConfig()).bad_sample == "stop"
