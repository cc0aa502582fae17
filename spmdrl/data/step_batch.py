"""Builds a step's batch from its episodes: adds columns, replays episodes, and assigns them to optimizer steps."""

import math
from collections.abc import Iterable

import torch

from spmdrl.algos.advantages import SCORE
from spmdrl.algos.resample import Buffer, draw, weights
from spmdrl.config.learning import FilterConfig, resampling
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, concatenate
from spmdrl.data.distribute import assign_updates, gather_rows
from spmdrl.data.episode import Episode
from spmdrl.data.microbatch import work_of
from spmdrl.data.pack import from_episodes
from spmdrl.spmd.exchange import gather_names
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import generator_for, seed_for, uniform
from spmdrl.spmd.world import World

RESAMPLE = 0x5046
"""Part of the random key for resampling."""


class ReplayBuffer:
    """Draws a step's training episodes, also from earlier steps. Policy filtration (PF-PPO) draws them by reward.

    Each rank stores the episodes that its engine sampled. Draws cover the episodes of all ranks, and each rank returns
    the drawn episodes that it stores.
    """

    def __init__(self, cfg: FilterConfig, prompts: int):
        """Start with an empty buffer. prompts: number of prompts per step.

        The position of an episode from `age` steps ago increases by prompts * age, so that positions stay distinct.
        """
        self.cfg, self.prompts = cfg, prompts
        self.buffer: Buffer[Batch] | None = Buffer(cfg.replay_steps) if cfg.replay_steps else None

    def mix(self, batch: Batch, seed: int, step: int, peers: Peers) -> Batch:
        """Draw as many episodes as the step sampled, with replacement. Collective.

        An episode that is drawn twice appears in the batch twice. Returns `batch` if the settings enable neither
        resampling nor replay.
        """
        if self.cfg.resample == "none" and self.buffer is None:
            return batch
        pool = batch
        if self.buffer is not None:
            for age in range(1, self.cfg.replay_steps + 1):
                for old in self.buffer.aged(age - 1):
                    seq = dict(old.seq, position=old.seq["position"] + self.prompts * age)
                    moved = Batch(old.lengths, old.token, seq, old.images)
                    # A step might have reward parts that another step lacks.
                    pool = concatenate(_with_parts(pool, moved.seq), _with_parts(moved, pool.seq))
            self.buffer.append(step, [batch])
        columns = torch.stack([pool.seq["reward"], pool.seq["position"].double()], 1)[pool.firsts]
        rows, mine = gather_rows(pool, pool.firsts, columns, peers)
        reward_N, position_N = rows[:, 0], rows[:, 1].long()
        count = int((position_N < self.prompts).sum())
        method, power = resampling(self.cfg.resample)
        weight_N = torch.ones_like(reward_N) if method == "none" else weights(reward_N, method, position_N, power)
        seeds = torch.full((count,), seed_for(seed, step, RESAMPLE), dtype=torch.int64)
        times_N = torch.bincount(draw(weight_N, uniform(seeds, torch.arange(count))), minlength=len(reward_N))
        return copies(pool, times_N[mine])


def copies(batch: Batch, times_E: torch.Tensor) -> Batch:
    """Repeat each episode `times_E` (int64 [E]) times. Its paths stay adjacent; each copy gets new path indices."""
    drawn = torch.repeat_interleave(torch.arange(len(times_E)), times_E)
    number = torch.arange(len(drawn)) - (torch.cumsum(times_E, 0) - times_E)[drawn]
    first, paths = batch.firsts[drawn], batch.identity["paths"][batch.firsts[drawn]]
    inside = torch.arange(int(paths.sum())) - torch.repeat_interleave(torch.cumsum(paths, 0) - paths, paths)
    out = batch.select(torch.repeat_interleave(first, paths) + inside)
    out.seq["path"] = inside + torch.repeat_interleave(number * paths, paths)
    out.seq["paths"] = torch.repeat_interleave(paths, paths)
    return out


def _with_parts(batch: Batch, names: Iterable[str]) -> Batch:
    """Add a nan column for each reward part (`part/...`) in `names` that the batch lacks."""
    lacking = [name for name in sorted(names) if name.startswith("part/") and name not in batch.seq]
    unknown_B = torch.full((len(batch),), math.nan, dtype=torch.float64)
    return Batch(batch.lengths, batch.token, batch.seq | dict.fromkeys(lacking, unknown_B), batch.images)


def make_batch(
    episodes: list[Episode],
    step: int,
    cfg: Config,
    world: World,
    replay: ReplayBuffer,
    turns: bool = False,
    skips_equal: bool = False,
    experts_width: int = 0,
    share_prompts: bool = False,
    model_parts: tuple[str, ...] = (),
    placeholder: int | None = None,
) -> Batch:
    """Pack this rank's episodes, if any, and assign the sequences to optimizer steps. Collective.

    step: counted from 0. replay: draws the episodes to train on from this batch and earlier batches.
    turns: True if advantages are computed per turn. skips_equal: True if prompts whose samples all have the same reward
    are skipped. experts_width: as in `from_episodes`. share_prompts: True if tokens shared by a prompt's samples are
    computed once. model_parts: names of the reward parts that a reward model will add. placeholder: as in
    `from_episodes`.
    """
    # A rank without samples does not know the reward part names, but all ranks need the same columns.
    names = tuple(gather_names({name for e in episodes for name in e.parts}, world.host_group))
    prompts, seed = cfg.rollout.prompts_per_step, cfg.run.seed
    # With an environment, turns and their rewards are included even for advantages that are not computed per turn.
    acts = bool(cfg.env)
    batch = from_episodes(episodes, names, experts_width, acts or turns, acts, placeholder)
    rows = zip(*(batch.seq[k].tolist() for k in ("prompt", "position", "sample")), strict=True)
    batch.seq["seed"] = torch.tensor([seed_for(seed, step, *row, 1) for row in rows], dtype=torch.int64)
    batch.seq["work"], common = work_of(batch, share_prompts)
    if skips_equal:
        # Engines return complete groups, so their rewards can be compared. A skipped sequence counts as one token of
        # work.
        batch.seq["work"] = torch.where(batch.group_differs(), batch.seq["work"], 1)
    if share_prompts:
        batch.seq["common"] = torch.minimum(common, batch.seq["work"] - 1)
    batch = replay.mix(batch, seed, step, Peers(world.group, world.device))
    _check_parts(batch, cfg, model_parts)
    order = list(range(prompts))
    generator_for(seed, step, 1).shuffle(order)
    return assign_updates(batch, cfg.algo.updates_per_step, prompts, order)


def _check_parts(batch: Batch, cfg: Config, later: tuple[str, ...] = ()) -> None:
    """Raise ValueError if a sample lacks a reward part that training uses, since missing parts do not count as 0.

    If grading timed out, missing parts do count as 0 (`from_episodes`).
    later: parts that a reward model adds to every sample afterwards.
    """
    given = [name.removeprefix("part/") for name in batch.seq if name.startswith("part/")]
    used = [("--safety.cost", cfg.safety.cost)] if cfg.safety.cost else []
    used += [("--algo.part-weights", spec.partition("=")[0]) for spec in cfg.algo.part_weights]
    if cfg.algo.advantage == "gdpo" and not cfg.algo.part_weights:
        used = [("--algo.part-weights (empty: all parts), part", name) for name in given]
    for flag, part in used:
        if part == SCORE or part in later:
            continue
        missing = f"{flag} {part}: the reward does not give this part"
        if part not in given:
            raise ValueError(f"{missing}; its parts: {', '.join([*given, *later]) or 'none'}")
        lacking = torch.nonzero(batch.seq[f"part/{part}"].isnan()).flatten()
        if len(lacking):
            row = int(lacking[0])
            prompt, sample = int(batch.seq["prompt"][row]), int(batch.seq["sample"][row])
            raise ValueError(
                f"{missing} for prompt {prompt}, sample {sample}, but does for others: let the reward function return "
                "it for every sample, as a finite number, or use other parts (--algo.part-weights, --safety.cost)"
            )
