"""Replay and resampling: a step learns from sequences drawn by reward, of this step and of some before."""

import math
from collections.abc import Iterable

import torch

from spmdrl.algos.resample import Buffer, draw, weights
from spmdrl.config.learning import FilterConfig, resampling
from spmdrl.data.batch import Batch, concatenate
from spmdrl.data.dealing import gather_rows
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import seed_for, uniform

RESAMPLE = 0x5046
"""Keys the draws of `resample`."""


def with_parts(batch: Batch, names: Iterable[str]) -> Batch:
    """The batch with a column of nan for each `part/...` among names that it has not."""
    lacking = [name for name in sorted(names) if name.startswith("part/") and name not in batch.seq]
    unknown_B = torch.full((len(batch),), math.nan, dtype=torch.float64)
    return Batch(batch.lengths, batch.token, batch.seq | dict.fromkeys(lacking, unknown_B))


class ReplayBuffer:
    """Policy filtration (PF-PPO): each step learns from episodes drawn by reward, of this step and of some before.

    A rank keeps what its engine sampled; what is drawn may come from any rank.
    """

    def __init__(self, cfg: FilterConfig, prompts: int):
        """prompts: prompts of a step; an episode that is `age` steps old stands at positions prompts * age and up."""
        self.cfg, self.prompts = cfg, prompts
        self.buffer: Buffer[Batch] | None = Buffer(cfg.replay_steps) if cfg.replay_steps else None

    def mix(self, batch: Batch, seed: int, step: int, peers: Peers) -> Batch:
        """As many episodes as the step sampled, drawn with replacement; the batch itself where none is asked for.

        Collective. An episode that is drawn twice stands there twice.
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
    """Repeat each episode so many times, int64 [E]: its paths stay beside each other and are counted on."""
    drawn = torch.repeat_interleave(torch.arange(len(times_E)), times_E)
    number = torch.arange(len(drawn)) - (torch.cumsum(times_E, 0) - times_E)[drawn]
    first, paths = batch.firsts[drawn], batch.identity["paths"][batch.firsts[drawn]]
    inside = torch.arange(int(paths.sum())) - torch.repeat_interleave(torch.cumsum(paths, 0) - paths, paths)
    out = batch.select(torch.repeat_interleave(first, paths) + inside)
    out.seq["path"] = inside + torch.repeat_interleave(number * paths, paths)
    out.seq["paths"] = torch.repeat_interleave(paths, paths)
    return out
