"""Fills the batch of one step: runs rollouts until enough prompts have passed the filter."""

import math
from collections import Counter
from collections.abc import Callable

import torch

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.filters import choose, shortage, whole_groups
from spmdrl.config.learning import FilterConfig
from spmdrl.config.schema import Config
from spmdrl.data.episode import Episode
from spmdrl.rewards.load import check_ungraded
from spmdrl.rl.environment import COUNTS, describe_environment
from spmdrl.rl.rollout_plan import Experience, PromptGroup, RolloutPlan
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.world import World


class Filling:
    """Accumulates the results of a step's rollouts on all sampling ranks, until enough prompts are kept.

    All ranks run the same number of rollouts, because the count of kept prompts is global (law 1). If more prompts are
    kept than the step needs, it uses the prompts that were drawn first, no matter which rank sampled them. Surplus
    prompts are dropped and counted in the metrics `*/surplus_prompts`.
    """

    def __init__(self, cfg: Config, world: World, keep: Callable | None, step: int, carried: list[PromptGroup]):
        """Prepare the batch of a step. Collective over the ranks that sample.

        keep: filter from `algos/filters.py`, or None. carried: groups of the previous step to continue on this engine.
        """
        self.cfg, self.world, self.keep, self.step, self.carried = cfg, world, keep, step, carried
        self.wanted, self.oversampled = cfg.rollout.prompts_per_step, cfg.rollout.oversample > 1
        self.partial = cfg.rollout.partial_steps
        self.advantage = ADVANTAGES.get(cfg.algo.advantage)
        """Properties of the advantage estimator, or None for a user-defined function."""
        self.compares = self.advantage is not None and self.advantage.compares and cfg.rollout.samples_per_prompt > 1
        """True if prompts have several samples and the advantage compares them. A sample is then dropped if all other
        samples of its prompt are dropped."""
        self.carried_by = carried_by(carried, world) if self.partial else []
        self.before = sum(self.carried_by)
        """Number of carried groups on all engines."""
        self.done = Experience([])
        """Accumulated result of all rollouts so far, with only the episodes that passed the filter."""
        self.rewards: list[float] = []
        """Rewards of this rank's samples, nan for samples that could not be graded."""
        self.positions = torch.zeros(0, dtype=torch.int64)
        """Positions of the prompts kept on all ranks."""
        self.unbegun = self.rounds = self.version = 0
        self.why = ""
        """First reason why an environment made this rank drop an episode, or an empty string."""

    @property
    def most_rounds(self) -> int:
        """Maximum number of rollouts in the step."""
        return self.cfg.filter.max_rounds if self.keep else 1

    @property
    def is_full(self) -> bool:
        """True if enough prompts were kept. Without a filter, one rollout is enough."""
        return not self.keep or len(self.positions) >= self.wanted

    @property
    def next_prompts(self) -> int:
        """Number of prompts to draw in the next rollout."""
        over = math.ceil(self.wanted * self.cfg.rollout.oversample)
        return max(over - (self.before if self.rounds == 0 else 0), 0)

    def order(self, plan: RolloutPlan) -> None:
        """Complete the plan of the step's next rollout: set its name, carried groups and stopping conditions."""
        # The rollout number keeps names unique, even if the step's previous rollout started no prompts.
        plan.name += f"/{self.rounds}"
        if self.oversampled:
            plan.enough, plan.least = self.wanted, 1 + self.compares
        if self.rounds == 0:
            plan.carried, plan.carried_by = self.carried, self.carried_by
            plan.must_end = self.step - self.partial if self.partial else -1
        plan.keeps_cut = bool(self.partial)

    def take(self, plan: RolloutPlan, result: Experience) -> None:
        """Add the result of a rollout. Collective over the ranks that sample."""
        done, drawn = self.done, len(plan.prompts)
        self.rounds += 1
        self.version = plan.version
        done.carried += result.carried
        if self.oversampled:
            # A rollout may end before all of its prompts have started. The next rollout draws the prompts that follow
            # the last started prompt.
            drawn = int(all_reduce(torch.tensor([result.drawn]), "max", self.world.rollout_group))
            rest = plan.unbegun(result, drawn, self.world)
            if self.partial:
                done.carried += rest
            else:
                self.unbegun += len(rest)
        done.drawn += drawn
        # Like `reward/ungraded`, `failures` counts only completed groups; a carried group is counted when it is
        # completed.
        counts = result.counts | {"failures": sum(e.finish == "abort" for e in result.episodes)}
        done.counts = {name: done.counts.get(name, 0.0) + n for name, n in counts.items()}
        usable = [e for e in result.episodes if math.isfinite(e.reward)]
        if self.compares:
            # A sample cannot be compared if all other samples of its prompt were dropped: its baseline would be 0, and
            # its advantage would be the raw reward. All samples of a prompt are on the same rank.
            samples = Counter(e.position for e in usable)
            usable = [e for e in usable if samples[e.position] > 1]
        done.bad_samples += len(result.episodes) - len(usable)
        self.rewards += [e.reward for e in result.episodes if e.ungraded or math.isfinite(e.reward)]
        self.why = self.why or next((e.why for e in result.episodes if e.why), "")
        if self.keep:
            # Check this before the next rollout, because prompts that cannot be graded would never fill the step.
            counts = torch.tensor([sum(e.ungraded for e in result.episodes), len(result.episodes)])
            ungraded, graded = all_reduce(counts, "sum", self.world.rollout_group).tolist()
            self._check(ungraded, graded, "a rollout")
            by_turn = self.advantage is not None and "turn" in self.advantage.reads
            usable = passing(usable, self.keep, self.cfg.filter, by_turn)
        done.episodes += usable
        mine = torch.tensor(sorted({e.position for e in done.episodes}), dtype=torch.int64)
        rows = all_gather_rows(mine[:, None], self.world.rollout_group)
        self.positions = torch.cat([part[:, 0].cpu() for part in rows])

    def _check(self, ungraded: int, graded: int, where: str) -> None:
        size = self.cfg.rollout.samples_per_prompt
        check_ungraded(ungraded, graded, self.cfg.reward, where, size, self.cfg.env, self.why)

    def shortage(self) -> ValueError:
        """Return the error for a step that could not be filled; its message states the acceptance rate."""
        drawn, rounds = self.done.drawn + self.before, self.cfg.filter.max_rounds
        return ValueError(shortage(self.cfg.filter.keep, len(self.positions), drawn, self.wanted, rounds))

    def experience(self) -> Experience:
        """Return the step's episodes for training, with its metrics. Collective over the ranks that sample."""
        done, chosen = self.done, choose(self.positions, self.wanted)
        place = {int(position): i for i, position in enumerate(chosen)}
        done.episodes = [e for e in done.episodes if e.position in place]
        for episode in done.episodes:
            episode.position = place[episode.position]
        self._describe(len(self.positions) - len(chosen))
        if not self.partial:
            done.carried = []
        return done

    def _describe(self, surplus: int) -> None:
        done, group = self.done, self.world.rollout_group
        drawn, stats = done.drawn + self.before, done.stats
        reward_N = torch.cat(all_gather_rows(torch.tensor(self.rewards, dtype=torch.float64)[:, None], group)).flatten()
        ungraded = int(reward_N.isnan().sum())
        self._check(ungraded, len(reward_N), "a step")
        stats.add("reward/ungraded", ungraded)
        if not self.cfg.reward.model:
            # The mean is over all graded samples, including dropped samples. Sort the rewards, because summing them in
            # order of arrival would make the rounding nondeterministic.
            reward_N = reward_N[~reward_N.isnan()].sort().values
            stats.add("reward/mean", reward_N.mean() if len(reward_N) else 0.0, len(reward_N))
        if self.cfg.env:
            counts = torch.tensor([done.counts.get(name, 0.0) for name in COUNTS], dtype=torch.float64)
            describe_environment(stats, dict(zip(COUNTS, all_reduce(counts, "sum", group).tolist(), strict=True)))
        if self.keep:
            stats.add("filter/rounds", self.rounds)
            stats.add("filter/accepted", len(self.positions) / max(1, drawn))
            stats.add("filter/dropped_prompts", drawn - len(self.positions))
            stats.add("filter/surplus_prompts", surplus)
        if self.oversampled or self.partial:
            leads = self.world.engine_tp_rank == 0
            tokens = sum(e.generated for g in done.carried for e in g.episodes) * leads
            segments = [s for e in done.episodes for s in e.segments]
            stale = sum(len(s) for s in segments if s.sampled and s.version < self.version)
            counts = torch.tensor([len(done.carried) * leads, tokens, stale, self.unbegun * leads])
            names = ("cut_prompts", "cut_tokens", "stale_tokens", "unbegun_prompts")
            for name, count in zip(names, all_reduce(counts, "sum", group).tolist(), strict=True):
                stats.add(f"rollout/{name}", count)
            stats.add("rollout/surplus_prompts", surplus)


def carried_by(groups: list[PromptGroup], world: World) -> list[int]:
    """Return the number of carried groups per engine. Collective over the ranks that sample.

    groups: carried groups of this rank's engine.
    """
    row = torch.tensor([[world.engine_index, len(groups)]])
    rows = torch.cat(all_gather_rows(row, world.rollout_group)).tolist()
    # All ranks of an engine have the same groups.
    return [count for _, count in sorted(dict(rows).items())]


def passing(episodes: list[Episode], keep: Callable, cfg: FilterConfig, by_turn: bool = False) -> list[Episode]:
    """Return the episodes whose group passes the filter. Requires all episodes of each group.

    by_turn: True if advantages are computed per turn. The filter `mixed` then also keeps groups whose episodes have
    equal total rewards but different per-turn rewards.
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
    """Return a dict that maps the turns of an episode to their rewards, without rewards of 0.

    The reward of the last turn includes the final reward.
    """
    out = {episode.turns - 1: episode.reward - episode.turn_rewards}
    for segment in episode.segments:
        out[segment.turn] = out.get(segment.turn, 0.0) + segment.reward
    # Values near zero are rounding errors, not rewards.
    return {turn: value for turn, reward in out.items() if (value := round(reward, 9))}


def metric_of(episode: Episode, metric: str) -> float:
    """Return the value to filter on: the reward part `metric`, or the reward if `metric` is empty.

    Raises ValueError if the episode lacks the part. If the episode's grading timed out, a missing part counts as 0
    instead.
    """
    if not metric:
        return episode.reward
    if metric not in episode.parts and not episode.timed_out:
        raise ValueError(
            f"--filter.metric {metric}: the reward does not give this part for prompt {episode.prompt}, sample "
            f"{episode.sample}; its parts: {', '.join(episode.parts) or 'none'}"
        )
    return episode.parts.get(metric, 0.0)
