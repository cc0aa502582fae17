"""Fills the batch of one step: rollouts until the filter has kept enough prompts."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.filters import choose, shortage, whole_groups
from spmdrl.config.learning import FilterConfig
from spmdrl.config.schema import Config
from spmdrl.data.episode import Episode
from spmdrl.rewards.load import check_ungraded
from spmdrl.rl.environment import COUNTS, describe_environment
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan, RolloutResult, unbegun
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics


@dataclass
class Experience:
    """Episodes that a step learns from, on this rank: positions are 0 .. prompts - 1 over all ranks."""

    episodes: list[Episode]
    drawn: int = 0
    """Number of prompts that the step consumed over all ranks, up to the last one that was begun; known to the ranks
    that sample. The next step draws the later ones."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups for the next step that were cut short on this rank's engine, or drawn and not begun there."""
    bad_samples: int = 0
    """Samples left out on this rank because a reward or logp was not finite, they could not be graded, or all others of
    their prompt were left out and the advantage compares them."""
    stats: Metrics = field(default_factory=Metrics)


def with_others(episodes: list[Episode]) -> list[Episode]:
    """Leave out samples that are alone of their prompt: there is nothing to compare them with, and a baseline of 0
    would have them learn from the size of their reward. Groups are whole.
    """
    count = Counter(e.position for e in episodes)
    return [e for e in episodes if count[e.position] > 1]


class Filling:
    """Counts what the rollouts of a step bring, alike on all ranks that sample, until it is enough.

    All of them run as many rollouts: the count is of prompts that any rank kept (law 1). Of those, the ones drawn first
    are taken, so the rank that sampled them plays no part; the rest is dropped and counted.
    """

    def __init__(self, cfg: Config, world: World, keep: Callable | None, step: int, carried: list[PromptGroup]):
        """keep: filter of `algos/filters.py`, or None. carried: groups that the step before cut short. Collective."""
        self.cfg, self.world, self.keep, self.step, self.carried = cfg, world, keep, step, carried
        self.wanted, self.oversampled = cfg.rollout.prompts_per_step, cfg.rollout.oversample > 1
        self.partial = cfg.rollout.partial_steps
        self.advantage = ADVANTAGES.get(cfg.algo.advantage)
        """Its row; None for a user's own."""
        self.compares = self.advantage is not None and self.advantage.compares and cfg.rollout.samples_per_prompt > 1
        """True where a sample that is alone of its prompt is left out."""
        self.carried_by = carried_by(carried, world) if self.partial else []
        self.before = sum(self.carried_by)
        """Groups that all engines go on with."""
        self.kept: list[Episode] = []
        self.cut: list[PromptGroup] = []
        self.rewards: list[float] = []
        """Of all samples; nan where one could not be graded."""
        self.positions = torch.zeros(0, dtype=torch.int64)
        """Positions of the prompts that were kept on any rank."""
        self.drawn = self.bad = self.unbegun = self.rounds = self.version = 0
        self.counts: Counter[str] = Counter()
        """Sums of what environments did, on this rank."""
        self.why = ""
        """The reason for which an environment left out the first episode on this rank."""

    @property
    def most_rounds(self) -> int:
        """Most rollouts that may fill the step."""
        return self.cfg.filter.max_rounds if self.keep else 1

    @property
    def is_full(self) -> bool:
        """True if enough prompts were kept; without a filter, all are."""
        return not self.keep or len(self.positions) >= self.wanted

    @property
    def next_prompts(self) -> int:
        """Number of prompts that the next rollout draws."""
        over = math.ceil(self.wanted * self.cfg.rollout.oversample)
        return max(over - (self.before if self.rounds == 0 else 0), 0)

    def order(self, plan: RolloutPlan) -> None:
        """Gives the step's next plan the groups that it goes on with, and its condition to end."""
        # A rollout before this one may have begun no prompt.
        plan.name += f"/{self.rounds}"
        if self.oversampled:
            plan.enough, plan.least = self.wanted, 1 + self.compares
        if self.rounds == 0:
            plan.carried, plan.carried_by = self.carried, self.carried_by
            plan.must_end = self.step - self.partial if self.partial else -1
        plan.keeps_cut = bool(self.partial)

    def take(self, plan: RolloutPlan, result: RolloutResult) -> None:
        """Counts the result of a rollout. Collective over the ranks that sample."""
        self.rounds += 1
        self.version, self.cut, more = plan.version, self.cut + result.cut, len(plan.prompts)
        if self.oversampled:
            # Enough may be there before all prompts are begun: the line goes on after the last one that was.
            more = int(all_reduce(torch.tensor([result.begun]), "max", self.world.rollout_group))
            rest = unbegun(plan, result, more, self.world)
            self.cut += rest if self.partial else []
            self.unbegun += 0 if self.partial else len(rest)
        self.drawn += more
        # Of the episodes that end here, as `reward/ungraded` has them: one of a group that goes on comes later.
        failed = sum(e.finish == "abort" for e in result.episodes)
        self.counts.update(result.counts | {"failures": failed})
        usable = [e for e in result.episodes if math.isfinite(e.reward)]
        if self.compares:
            usable = with_others(usable)
        self.bad += len(result.episodes) - len(usable)
        self.rewards += [e.reward for e in result.episodes if e.ungraded or math.isfinite(e.reward)]
        self.why = self.why or next((e.why for e in result.episodes if e.why), "")
        if self.keep:
            # Before more is sampled: what cannot be graded would fill no round.
            size = self.cfg.rollout.samples_per_prompt
            counts = torch.tensor([sum(e.ungraded for e in result.episodes), len(result.episodes)])
            ungraded, graded = all_reduce(counts, "sum", self.world.rollout_group).tolist()
            check_ungraded(ungraded, graded, self.cfg.reward, "a rollout", size, self.cfg.env, self.why)
        by_turn = self.advantage is not None and "turn" in self.advantage.reads
        self.kept += passing(usable, self.keep, self.cfg.filter, by_turn) if self.keep else usable
        mine = torch.tensor(sorted({e.position for e in self.kept}), dtype=torch.int64)
        rows = all_gather_rows(mine[:, None], self.world.rollout_group)
        self.positions = torch.cat([part[:, 0].cpu() for part in rows])

    def shortage(self) -> ValueError:
        """The error of a step that could not be filled, with the acceptance rate."""
        drawn, rounds = self.drawn + self.before, self.cfg.filter.max_rounds
        return ValueError(shortage(self.cfg.filter.keep, len(self.positions), drawn, self.wanted, rounds))

    def experience(self) -> Experience:
        """Returns the episodes that the step learns from, and its numbers. Collective over the ranks that sample."""
        chosen = choose(self.positions, self.wanted)
        place = {int(position): i for i, position in enumerate(chosen)}
        taken = [e for e in self.kept if e.position in place]
        for episode in taken:
            episode.position = place[episode.position]
        out = Experience(taken, self.drawn, self.cut if self.partial else [], self.bad)
        self._describe(out, len(self.positions) - len(chosen))
        return out

    def _describe(self, out: Experience, surplus: int) -> None:
        drawn, group = self.drawn + self.before, self.world.rollout_group
        reward_N = torch.cat(all_gather_rows(torch.tensor(self.rewards, dtype=torch.float64)[:, None], group)).flatten()
        ungraded, size = int(reward_N.isnan().sum()), self.cfg.rollout.samples_per_prompt
        check_ungraded(ungraded, len(reward_N), self.cfg.reward, "a step", size, self.cfg.env, self.why)
        out.stats.add("reward/ungraded", ungraded)
        if not self.cfg.reward.model:
            # Of all that was graded; a reward model sees only what is learnt from. Sorted, as they came in any order.
            reward_N = reward_N[~reward_N.isnan()].sort().values
            out.stats.add("reward/mean", reward_N.mean() if len(reward_N) else 0.0, len(reward_N))
        if self.cfg.env:
            counts = all_reduce(torch.tensor([self.counts[name] for name in COUNTS], dtype=torch.float64), "sum", group)
            describe_environment(out.stats, dict(zip(COUNTS, counts.tolist(), strict=True)))
        if self.keep:
            out.stats.add("filter/rounds", self.rounds)
            out.stats.add("filter/accepted", len(self.positions) / max(1, drawn))
            out.stats.add("filter/dropped_prompts", drawn - len(self.positions))
            out.stats.add("filter/surplus_prompts", surplus)
        if self.oversampled or self.partial:
            leads = self.world.engine_tp_rank == 0
            tokens = sum(e.made for g in self.cut for e in g.episodes) * leads
            segments = [s for e in out.episodes for s in e.segments]
            stale = sum(len(s) for s in segments if s.sampled and s.version < self.version)
            counts = torch.tensor([len(self.cut) * leads, tokens, stale, self.unbegun * leads])
            names = ("cut_prompts", "cut_tokens", "stale_tokens", "unbegun_prompts")
            for name, count in zip(names, all_reduce(counts, "sum", group).tolist(), strict=True):
                out.stats.add(f"rollout/{name}", count)
            out.stats.add("rollout/surplus_prompts", surplus)


def carried_by(groups: list[PromptGroup], world: World) -> list[int]:
    """Returns the number of groups that each engine goes on with. Collective over the ranks that sample."""
    row = torch.tensor([[world.engine_index, len(groups)]])
    rows = torch.cat(all_gather_rows(row, world.rollout_group)).tolist()
    # The ranks of an engine hold the same groups.
    count = dict(rows)
    return [count[engine] for engine in range(world.engine_count)]


def passing(episodes: list[Episode], keep: Callable, cfg: FilterConfig, by_turn: bool = False) -> list[Episode]:
    """The episodes whose group the filter keeps; an engine's groups are whole.

    by_turn: the advantage compares turns, so that equal totals of unlike turns are `mixed` too.
    """
    score = [metric_of(e, cfg.metric) for e in episodes]
    group_B = torch.tensor([e.position for e in episodes], dtype=torch.int64)
    settings = {"low": cfg.low, "high": cfg.high} if cfg.keep == "accuracy_range" else {}
    first = {e.position: e for e in reversed(episodes)}
    keep_B = whole_groups(keep(torch.tensor(score, dtype=torch.float64), group_B, **settings), group_B, cfg.keep)
    if by_turn and cfg.keep == "mixed" and not cfg.metric:
        unlike = {e.position for e in episodes if rewards_by_turn(e) != rewards_by_turn(first[e.position])}
        keep_B |= torch.tensor([e.position in unlike for e in episodes], dtype=torch.bool)
    return [e for e, yes in zip(episodes, keep_B.tolist(), strict=True) if yes]


def rewards_by_turn(episode: Episode) -> dict[int, float]:
    """Return the rewards that fell in the turns of an episode, the final one with the last turn's; no zeros."""
    out = {episode.turns - 1: episode.reward - episode.turn_rewards}
    for segment in episode.segments:
        out[segment.turn] = out.get(segment.turn, 0.0) + segment.reward
    # What rounding leaves of a sum is no reward.
    return {turn: value for turn, reward in out.items() if (value := round(reward, 9))}


def metric_of(episode: Episode, metric: str) -> float:
    """Returns the number that a filter judges: the reward part `metric`, or the reward where that is empty."""
    if not metric:
        return episode.reward
    if metric not in episode.parts and not episode.timed_out:
        raise ValueError(
            f"--filter.metric {metric}: the reward gives no such part for prompt {episode.prompt}, sample "
            f"{episode.sample}; it gives {', '.join(episode.parts) or 'none'}"
        )
    return episode.parts.get(metric, 0.0)
