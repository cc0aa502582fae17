"""State that each rank holds by itself beside its models: saved as a tree in a checkpoint, restored on any world.

Held are groups that were cut short (partial rollouts), experience that was sampled ahead (split placement), the steps
that are replayed, and the states of the random number generators, for a loss or a reward of the user's that draws from
them: the run's own draws are keyed by data. What all ranks know alike (counters of draws and updates, KL coefficient)
stands in the checkpoint's `state/run.json`.

A rank reads what it wrote. On another world the holders' things are dealt out by `dealt`, groups whole, and generators
begin anew.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spmdrl.checkpoint import treefile
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.prompts import PromptSet
from spmdrl.data.replay_buffer import ReplayBuffer
from spmdrl.rl.fill_batch import Experience
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.trees import experience, experience_tree, fields_of, group, group_tree
from spmdrl.session.determinism import generator_states, set_generator_states
from spmdrl.spmd.world import World


@dataclass
class RankState:
    """State of a run on this rank that goes into checkpoints; a `session.checkpoints.RankKept`."""

    cfg: Config
    world: World
    prompts: PromptSet
    sampler: Sampler | None
    """None on a rank that does not sample."""
    replay: ReplayBuffer
    greedy: bool
    """A greedy response is sampled to every prompt (`RolloutPlan.greedy`)."""

    def tree(self) -> dict:
        """See the contract. No later step writes into its tensors."""
        world, ahead, buffer = self.world, self.sampler, self.replay.buffer
        samplers = world.roles.samplers
        # An engine's ranks hold the same groups, and its first one the episodes.
        leads = world.samples and world.engine_tp_rank == 0
        return {
            # leaders: the first rank of each engine.
            "layout": {"size": world.size, "leaders": list(samplers[:: self.cfg.engine_ranks])},
            "settings": self._settings(),
            "ahead": {
                "step": ahead.step,
                "draws": ahead.draws,
                "carried": [group_tree(g) for g in ahead.carried],
                "ready": [experience_tree(done) for done in ahead.ready],
            }
            if ahead and leads
            else None,
            "replay": [(step, fields_of(batch)) for step, batch in buffer.entries()] if buffer else [],
            "generators": generator_states(world.device),
        }

    def restore(self, files: list[Path]) -> str:
        """See the contract.

        Args:
            files: of all ranks that saved, in their order; empty where a checkpoint has none.

        Raises:
            ValueError: a file that cannot be read, or that does not belong to the others or to the step.
        """
        world, held = self.world, self._kinds()
        if not files:
            return _lost("it holds nothing of its ranks", [*held, "states of random number generators"])
        read = cache(lambda rank: treefile.read(files[rank]))
        layout = read(min(world.rank, len(files) - 1))["layout"]
        if layout["size"] != len(files):
            raise ValueError(f"{files[0].parent} holds files of {len(files)} ranks, saved by {layout['size']}")
        lost = []
        if len(files) == world.size:
            set_generator_states(read(world.rank)["generators"], world.device)
        else:
            lost.append(_lost(f"{len(files)} ranks made it, this run has {world.size}", ["states of generators"]))
        before, now = read(min(world.rank, len(files) - 1))["settings"], self._settings()
        changed = [name for name, value in now.items() if before.get(name) != value]
        if changed:
            return "; ".join([*lost, *([_lost(f"other {', '.join(changed)}", held)] if held else [])])
        try:
            if self.sampler:
                self._restore_ahead(read, layout["leaders"], self.sampler)
            if self.replay.buffer is not None:
                self._restore_replay(read, len(files))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{files[0].parent} was written by another version of this program: {error!r}") from error
        return "; ".join(lost)

    def _kinds(self) -> list[str]:
        """Kinds of things that this run holds, in words."""
        rollout = self.cfg.rollout
        held = ["groups that were cut short"] if rollout.partial_steps else []
        held += ["experience that was sampled ahead"] if rollout.staleness else []
        return held + (["the steps to be replayed"] if self.replay.buffer is not None else [])

    def _settings(self) -> dict[str, Any]:
        """Settings that must be as they were for the things held to fit."""
        rollout = self.cfg.rollout
        return {
            "prompts": self.prompts.digest(),
            "--rollout.prompts-per-step": rollout.prompts_per_step,
            "--rollout.samples-per-prompt": rollout.samples_per_prompt,
            "--rollout.max-new-tokens": rollout.max_new_tokens,
            "--rollout.routing-replay": rollout.routing_replay,
            "greedy baseline": self.greedy,
        }

    def _restore_ahead(self, read: Callable[[int], dict], leaders: list[int], ahead: Sampler) -> None:
        world = self.world
        numbers, share, shares = dealt(world.engine_index, world.engine_count, len(leaders))
        trees = [read(leaders[i])["ahead"] for i in numbers]
        first, steps_ready = trees[0], len(trees[0]["ready"])
        if first["step"] - steps_ready != ahead.step:
            raise ValueError(
                f"experience for step {first['step'] - steps_ready} was saved, and the run goes on at {ahead.step}"
            )
        ahead.draws, ahead.step = first["draws"], first["step"]
        prompts = {prompt.index: prompt for prompt in self.prompts.prompts}
        carried = [group(tree, prompts) for one in trees for tree in one["carried"][share::shares]]
        leads = world.engine_tp_rank == 0
        ready: deque[Experience] = deque()
        for same_step in zip(*(one["ready"] for one in trees), strict=True):
            parts = [experience(tree) for tree in same_step]
            episodes = [e for part in parts for e in part.episodes]
            kept = set(sorted({e.position for e in episodes})[share::shares])
            # Counted once, and what was alike on all ranks is so again.
            bad = sum(part.bad_samples for part in parts) if leads and not share else 0
            mine = [e for e in episodes if leads and e.position in kept]
            ready.append(Experience(mine, parts[0].drawn, [], bad, parts[0].stats))
        if len(trees) > 1:
            carried.sort(key=lambda g: g.position)
        ahead.carried, ahead.ready = carried, ready

    def _restore_replay(self, read: Callable[[int], dict], before: int) -> None:
        assert self.replay.buffer is not None
        numbers, share, shares = dealt(self.world.rank, self.world.size, before)
        entries = [(step, Batch(**tree)) for i in numbers for step, tree in read(i)["replay"]]
        for step, batch in sorted(entries, key=lambda entry: entry[0]):
            # A batch that was saved without paths has one path an episode.
            batch.seq |= batch.identity
            mine = batch
            if shares > 1:
                place_B = torch.unique(batch.seq["position"], return_inverse=True)[1]
                mine = batch.select(torch.nonzero(place_B % shares == share).flatten())
            self.replay.buffer.append(step, [mine])


def _lost(why: str, what: list[str]) -> str:
    return f"not resumed, as {why}: {', '.join(what)}"


def dealt(mine: int, count: int, before: int) -> tuple[list[int], int, int]:
    """Assign the state that `before` ranks saved to rank `mine` of `count`; every item goes to exactly one rank.

    Returns the numbers of the saved ranks that it reads, and which share of how many it takes of each: with as many
    ranks as before it takes its own, with fewer those of several, with more every n-th item of one.
    """
    if before >= count:
        return list(range(mine, before, count)), 0, 1
    return [mine % before], mine // before, len(range(mine % before, count, before))
