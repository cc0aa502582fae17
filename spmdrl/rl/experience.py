"""One step's experience: rounds of sampling until the filter has enough prompts, then replay and resampling."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from spmdrl.algos.advantages import SCORE
from spmdrl.algos.filters import choose, shortage, whole_groups
from spmdrl.algos.resample import Buffer, draw, weights
from spmdrl.config.schema import Config, FilterConfig
from spmdrl.data.batch import Batch, concatenate, gather_rows
from spmdrl.data.trajectory import Trajectory
from spmdrl.rl.collect import Collected, Group, Round, carried_by, unbegun
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.mesh import World
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import seed_for, uniform
from spmdrl.tracking.metrics import Metrics

RESAMPLE = 0x5046
"""Keys the draws of `resample`."""
LISTS = ("tokens", "logp", "versions")
"""What sampling adds to in a `Part`."""


@dataclass
class Experience:
    """What a step samples, on this rank: positions are 0 .. prompts - 1 over all ranks."""

    trajectories: list[Trajectory]
    drawn: int = 0
    """Prompts that it took from the line, over all ranks, up to the last one that was begun; known to those who sample.
    Those beyond are drawn in the next step."""
    carried: list[Group] = field(default_factory=list)
    """Groups that were cut short on this rank's engine, or not begun there though drawn, for the next step."""
    bad_samples: int = 0
    """Left out on this rank because a reward or logp was not finite."""
    stats: Metrics = field(default_factory=Metrics)


def copies(groups: list[Group]) -> list[Group]:
    """Groups to go on with, apart from what they were."""
    parts = [{s: replace(p, **{k: list(getattr(p, k)) for k in LISTS}) for s, p in g.parts.items()} for g in groups]
    return [replace(group, parts=own) for group, own in zip(groups, parts, strict=True)]


class Ahead:
    """The experience of one step after the other, each sampled when it is asked for, or before that.

    What counts the prompts and what was cut short belong to the sampling, which is as far as `staleness` steps ahead.
    So the experience of step k comes from the weights that step max(k - staleness, first) began with.
    """

    def __init__(
        self, sample: Callable[[int, list[Group]], Experience], staleness: int, first: int, steps: int, draws: int
    ):
        """sample: (step, groups that were cut short before) -> its experience. steps: of the run; draws: before."""
        self.sample, self.staleness, self.step, self.steps, self.draws = sample, staleness, first, steps, draws
        self.carried: list[Group] = []
        self.ready: deque[Experience] = deque()

    def take(self, step: int) -> Experience:
        """What was sampled for this step. Collective over those who sample."""
        if not self.ready:
            self._next()
        assert self.step - len(self.ready) == step, "one step after the other"
        return self.ready.popleft()

    def look_ahead(self, step: int) -> None:
        """Sample what may be sampled by the weights of this step. Collective over those who sample."""
        while self.step <= step + self.staleness and self.step < self.steps:
            self._next()

    def _next(self) -> None:
        # A copy: sampling that is abandoned leaves them as they were.
        done = self.sample(self.step, copies(self.carried))
        self.step += 1
        self.draws += done.drawn
        self.carried = done.carried
        self.ready.append(done)


def fill(
    round_at: Callable[[int, int], Round],
    collect: Callable[[Round], Collected],
    keep: Callable | None,
    cfg: Config,
    world: World,
    carried: list[Group],
    step: int,
) -> Experience:
    """Sample until a step has its prompts; without a filter, once. Collective over those who sample.

    All of them go round as often: what is counted is what all ranks kept (law 1). Of the prompts kept, those drawn
    first are taken, so which rank sampled them plays no part; the rest is dropped and counted.

    Args:
        round_at: (prompts drawn in this step before, prompts) -> a round of that many more.
        collect: samples a round.
        keep: filter of `algos/filters.py`, or None.
        cfg: the run's settings.
        world: all ranks.
        carried: groups that the step before cut short on this rank's engine; they come first.
        step: counted from 0.

    Raises:
        ValueError: `cfg.filter.max_rounds` rounds did not fill the step; with the acceptance rate.
    """
    wanted, over = cfg.rollout.prompts_per_step, cfg.rollout.oversample
    partial = cfg.rollout.partial_steps
    kept: list[Trajectory] = []
    cut: list[Group] = []
    graded: list[float] = []
    positions, drawn, bad, left = torch.zeros(0, dtype=torch.int64), 0, 0, 0
    from_before = carried_by(carried, world) if partial else []
    before = sum(from_before)
    for index in range(cfg.filter.max_rounds if keep else 1):
        more = max(math.ceil(wanted * over) - (before if index == 0 else 0), 0)
        round_ = round_at(drawn, more)
        # A round before this one may have begun no prompt.
        round_.name += f"/{index}"
        if over > 1:
            round_.enough = wanted
        if index == 0:
            round_.carried, round_.must_end = carried, step - partial if partial else -1
            round_.carried_by = from_before
        done = collect(round_)
        cut += done.cut
        if over > 1:
            # Enough may be there before all prompts are begun: the line goes on after the last one that was.
            more = int(all_reduce(torch.tensor([done.begun]), "max", world.rollout_group))
            rest = unbegun(round_, done, more, world)
            cut += rest if partial else []
            left += 0 if partial else len(rest)
        drawn += more
        usable = [t for t in done.trajectories if math.isfinite(t.reward)]
        bad += len(done.trajectories) - len(usable)
        graded += [t.reward for t in usable]
        kept += passing(usable, keep, cfg.filter) if keep else usable
        mine = torch.tensor(sorted({t.position for t in kept}), dtype=torch.int64)
        positions = torch.cat([part[:, 0].cpu() for part in all_gather_rows(mine[:, None], world.rollout_group)])
        if not keep or len(positions) >= wanted:
            break
    else:
        raise ValueError(shortage(cfg.filter.keep, len(positions), drawn + before, wanted, cfg.filter.max_rounds))
    chosen = choose(positions, wanted)
    place = {int(position): i for i, position in enumerate(chosen)}
    taken = [t for t in kept if t.position in place]
    for t in taken:
        t.position = place[t.position]
    out = Experience(taken, drawn, cut if partial else [], bad)
    if not cfg.reward.model:
        # Of all that was graded; a reward model sees only what is learnt from. Sorted, as the order is that of arrival.
        rows = all_gather_rows(torch.tensor(graded, dtype=torch.float64)[:, None], world.rollout_group)
        reward_N = torch.cat(rows).flatten().sort().values
        out.stats.add("reward/mean", reward_N.mean() if len(reward_N) else 0.0, len(reward_N))
    if keep:
        out.stats.add("filter/rounds", index + 1)
        out.stats.add("filter/accepted", len(positions) / max(1, drawn + before))
        out.stats.add("filter/dropped_prompts", drawn + before - len(positions))
        out.stats.add("filter/surplus_prompts", len(positions) - len(chosen))
    if over > 1 or partial:
        leader = world.engine_tp_rank == 0
        tokens = sum(len(part.tokens) for group in cut for part in group.parts.values()) * leader
        stale = sum(int((t.versions[t.mask] < round_.version).sum()) for t in taken if t.versions is not None)
        counts = torch.tensor([len(cut) * leader, tokens, stale, left * leader])
        names = ("cut_prompts", "cut_tokens", "stale_tokens", "unbegun_prompts")
        for name, count in zip(names, all_reduce(counts, "sum", world.rollout_group).tolist(), strict=True):
            out.stats.add(f"rollout/{name}", count)
        out.stats.add("rollout/surplus_prompts", len(positions) - len(chosen))
    return out


def check_parts(batch: Batch, cfg: Config) -> None:
    """Every sample must have the reward parts that training uses: one that is missing is not 0.

    Raises:
        ValueError: naming part, prompt and sample.
    """
    given = [name.removeprefix("part/") for name in batch.seq if name.startswith("part/")]
    used = [("--safety.cost", cfg.safety.cost)] if cfg.safety.cost else []
    used += [("--algo.part-weights", spec.partition("=")[0]) for spec in cfg.algo.part_weights]
    if cfg.algo.advantage == "gdpo" and not cfg.algo.part_weights:
        used = [("--algo.part-weights, where none is named, takes all parts:", name) for name in given]
    for flag, part in used:
        if part == SCORE:
            continue
        said = f"{flag} {part}: the reward gives no such part"
        if part not in given:
            raise ValueError(f"{said}; it gives {', '.join(given) or 'none'}")
        lacking = torch.nonzero(batch.seq[f"part/{part}"].isnan()).flatten()
        if len(lacking):
            row = int(lacking[0])
            prompt, sample = int(batch.seq["prompt"][row]), int(batch.seq["sample"][row])
            raise ValueError(
                f"{said} for prompt {prompt}, sample {sample}, but does for others: let the function return it, a "
                "finite number, for every sample, or learn from other parts (--algo.part-weights, --safety.cost)"
            )


def passing(trajectories: list[Trajectory], keep: Callable, cfg: FilterConfig) -> list[Trajectory]:
    """The trajectories whose group the filter keeps; an engine's groups are whole."""
    score = [metric_of(t, cfg.metric) for t in trajectories]
    group_B = torch.tensor([t.position for t in trajectories], dtype=torch.int64)
    settings = {"low": cfg.low, "high": cfg.high} if cfg.keep == "accuracy_range" else {}
    keep_B = whole_groups(keep(torch.tensor(score, dtype=torch.float64), group_B, **settings), group_B, cfg.keep)
    return [t for t, yes in zip(trajectories, keep_B.tolist(), strict=True) if yes]


def metric_of(t: Trajectory, metric: str) -> float:
    """Returns the number that a filter judges: the reward part `metric`, or the reward where that is empty."""
    if not metric:
        return t.reward
    if metric not in t.parts and not t.timed_out:
        raise ValueError(
            f"--filter.metric {metric}: the reward gives no such part for prompt {t.prompt}, sample {t.sample}; it "
            f"gives {', '.join(t.parts) or 'none'}"
        )
    return t.parts.get(metric, 0.0)


def with_parts(batch: Batch, names: Iterable[str]) -> Batch:
    """The batch with a column of nan for each `part/...` among names that it has not."""
    lacking = [name for name in sorted(names) if name.startswith("part/") and name not in batch.seq]
    unknown_B = torch.full((len(batch),), math.nan, dtype=torch.float64)
    return Batch(batch.lengths, batch.token, batch.seq | dict.fromkeys(lacking, unknown_B))


class Replay:
    """Policy filtration (PF-PPO): each step learns from sequences drawn by reward, of this step and of some before.

    A rank keeps what its engine sampled; what is drawn may come from any rank.
    """

    def __init__(self, cfg: FilterConfig, prompts: int):
        """prompts: prompts of a step; a sequence that is `age` steps old stands at positions prompts * age and up."""
        self.cfg, self.prompts = cfg, prompts
        self.buffer: Buffer[Batch] | None = Buffer(cfg.replay_steps) if cfg.replay_steps else None

    def mix(self, batch: Batch, seed: int, step: int, peers: Peers) -> Batch:
        """As many sequences as the step sampled, drawn with replacement; the batch itself where none is asked for.

        Collective. A sequence that is drawn twice stands there twice.
        """
        if self.cfg.resample == "none" and self.buffer is None:
            return batch
        pool = batch
        if self.buffer is not None:
            for age in range(1, self.cfg.replay_steps + 1):
                for old in self.buffer.aged(age - 1):
                    moved = Batch(
                        old.lengths, old.token, dict(old.seq, position=old.seq["position"] + self.prompts * age)
                    )
                    # A step may have met reward parts that another one has not.
                    pool = concatenate(with_parts(pool, moved.seq), with_parts(moved, pool.seq))
            self.buffer.append(step, [batch])
        columns = torch.stack([pool.seq["reward"], pool.seq["position"].double()], 1)
        rows, mine = gather_rows(pool, torch.arange(len(pool)), columns, peers)
        reward_N, position_N = rows[:, 0], rows[:, 1].long()
        count = int((position_N < self.prompts).sum())
        method = self.cfg.resample
        weight_N = (
            torch.ones_like(reward_N)
            if method == "none"
            else weights(reward_N, method, self.cfg.resample_power if method == "pow" else 1.0, position_N)
        )
        seeds = torch.full((count,), seed_for(seed, step, RESAMPLE), dtype=torch.int64)
        times_N = torch.bincount(draw(weight_N, uniform(seeds, torch.arange(count))), minlength=len(reward_N))
        return pool.select(torch.repeat_interleave(torch.arange(len(pool)), times_N[mine]))
