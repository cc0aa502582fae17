"""State of a run that checkpoints save besides its models: equal on all ranks (RunState) or per rank (RankState).

Per-rank state consists of groups that were cut short (partial rollouts), experience sampled in advance (split
placement), replay-buffer batches, and random number generators. The run seeds its own draws from data, so the
generators matter only if a user-defined loss or reward draws from them. Each rank saves its state as a tree of plain
values and tensors (`checkpoint/treefile.py`), and reads the same file when the run resumes. If the number of ranks has
changed, `dealt` redistributes the saved groups, and generator states are not restored.
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
from spmdrl.data.prompts import PromptSet
from spmdrl.data.step_batch import ReplayBuffer
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rl.rollout_plan import Experience
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.spikes import Spikes
from spmdrl.rl.trees import Images, batch_of, batch_tree, experience, experience_tree, group, group_tree
from spmdrl.spmd.generators import generator_states, set_generator_states
from spmdrl.spmd.world import World


class RunState:
    """State that is equal on all ranks: coefficients, gradient guards and the number of drawn prompts.

    Implements `session.checkpoints.Kept`.
    """

    def __init__(self, algo: Algorithm, spikes: Spikes):
        self.algo, self.spikes = algo, spikes
        # No step has adapted the coefficients yet, so these are the configured values.
        self.begun_with = dict(algo.state)
        self.draws = 0
        """Number of prompts drawn for the finished steps."""

    def state(self) -> dict[str, Any]:
        """Implements `Kept.state`."""
        return {
            "guards": self.spikes.state(),
            "algorithm": self.algo.state,
            "begun_with": self.begun_with,
            "draws": self.draws,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Implements `Kept.restore`. A coefficient whose setting was changed (--run.allow-changes) is not restored."""
        begun = state.get("begun_with", self.begun_with)
        self.algo.state |= {k: v for k, v in state["algorithm"].items() if begun.get(k) == self.begun_with.get(k)}
        self.spikes.restore(state.get("guards", {}))
        self.draws = state["draws"]


@dataclass
class RankState:
    """Per-rank state of a run. Implements `session.checkpoints.RankKept`."""

    cfg: Config
    world: World
    prompts: PromptSet
    sampler: Sampler | None
    """The sampler whose groups and experience are saved, or None on ranks that do not sample."""
    replay: ReplayBuffer
    greedy: bool
    """True if a greedy response to every prompt is also sampled (`RolloutPlan.greedy`)."""

    def tree(self) -> dict:
        """Implements `RankKept.tree`. Later steps do not modify the returned tensors."""
        world, ahead, buffer, images = self.world, self.sampler, self.replay.buffer, Images()
        samplers = world.roles.samplers
        # All ranks of an engine have the same groups, and only its first rank has the episodes.
        leads = world.samples and world.engine_tp_rank == 0
        return {
            # `leaders` lists the first rank of each engine.
            "layout": {"size": world.size, "leaders": list(samplers[:: self.cfg.engine_ranks])},
            "settings": self._settings(),
            "ahead": {
                "step": ahead.step,
                "draws": ahead.draws,
                "carried": [group_tree(g, images) for g in ahead.carried],
                "ready": [experience_tree(done, images) for done in ahead.ready],
            }
            if ahead and leads
            else None,
            "replay": [(step, batch_tree(batch, images)) for step, batch in buffer.entries()] if buffer else [],
            "generators": generator_states(world.device),
            # The trees above name images, which are collected while the trees are made.
            "images": images.tree(),
        }

    def restore(self, files: list[Path]) -> str:
        """Implements `RankKept.restore`.

        Args:
            files: files of all ranks that saved the checkpoint, in rank order; empty if it has none.

        Raises:
            ValueError: a file cannot be read, or belongs to another checkpoint or step.
        """
        world, held = self.world, self._kinds()
        if not files:
            return _lost("the checkpoint has no files of ranks", [*held, "states of random number generators"])
        read = cache(lambda rank: treefile.read(files[rank]))
        layout = read(min(world.rank, len(files) - 1))["layout"]
        if layout["size"] != len(files):
            raise ValueError(
                f"{files[0].parent} holds files of another number of ranks: {len(files)} instead of {layout['size']}"
            )
        lost = []
        if len(files) == world.size:
            set_generator_states(read(world.rank)["generators"], world.device)
        else:
            why = f"the number of ranks has changed from {len(files)} to {world.size}"
            lost.append(_lost(why, ["states of generators"]))
        before, now = read(min(world.rank, len(files) - 1))["settings"], self._settings()
        changed = [name for name, value in now.items() if before.get(name) != value]
        if changed:
            return "; ".join([*lost, *([_lost(f"these differ: {', '.join(changed)}", held)] if held else [])])
        try:
            if self.sampler:
                self._restore_ahead(read, layout["leaders"], self.sampler)
            if self.replay.buffer is not None:
                self._restore_replay(read, len(files))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{files[0].parent} was written by another version of this program: {error!r}") from error
        return "; ".join(lost)

    def _kinds(self) -> list[str]:
        """Return phrases that describe the per-rank state of this run, for messages."""
        rollout = self.cfg.rollout
        held = ["groups that were cut short"] if rollout.partial_steps else []
        held += ["experience that was sampled ahead"] if rollout.staleness else []
        return held + (["the steps to be replayed"] if self.replay.buffer is not None else [])

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be unchanged for the saved state to be usable."""
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
                f"experience for step {first['step'] - steps_ready} was saved, but the run continues at {ahead.step}"
            )
        ahead.draws, ahead.step = first["draws"], first["step"]
        prompts = {prompt.index: prompt for prompt in self.prompts.prompts}
        # A file of an earlier version has no images.
        held = [Images.of(read(leaders[i]).get("images", {})) for i in numbers]
        pairs = list(zip(trees, held, strict=True))
        carried = [group(tree, prompts, images) for one, images in pairs for tree in one["carried"][share::shares]]
        leads = world.engine_tp_rank == 0
        ready: deque[Experience] = deque()
        for same_step in zip(*(one["ready"] for one in trees), strict=True):
            parts = [experience(tree, images) for tree, images in zip(same_step, held, strict=True)]
            episodes = [e for part in parts for e in part.episodes]
            kept = set(sorted({e.position for e in episodes})[share::shares])
            # `Run._count` sums bad samples over ranks, so a single rank gets the whole count. `drawn` and metrics were
            # equal on all ranks.
            bad = sum(part.bad_samples for part in parts) if leads and not share else 0
            mine = [e for e in episodes if leads and e.position in kept]
            ready.append(Experience(mine, parts[0].drawn, [], bad, parts[0].stats))
        if len(trees) > 1:
            carried.sort(key=lambda g: g.position)
        ahead.carried, ahead.ready = carried, ready

    def _restore_replay(self, read: Callable[[int], dict], before: int) -> None:
        assert self.replay.buffer is not None
        numbers, share, shares = dealt(self.world.rank, self.world.size, before)
        entries = []
        for i in numbers:
            images = Images.of(read(i).get("images", {}))
            entries += [(step, batch_of(tree, images)) for step, tree in read(i)["replay"]]
        for step, batch in sorted(entries, key=lambda entry: entry[0]):
            # A batch saved without path columns has one path per episode.
            batch.seq |= batch.identity
            mine = batch
            if shares > 1:
                place_B = torch.unique(batch.seq["position"], return_inverse=True)[1]
                mine = batch.select(torch.nonzero(place_B % shares == share).flatten())
            self.replay.buffer.append(step, [mine])


def _lost(why: str, what: list[str]) -> str:
    return f"not resumed: {', '.join(what)} ({why})"


def dealt(mine: int, count: int, before: int) -> tuple[list[int], int, int]:
    """Distribute the state saved by `before` ranks over `count` ranks, so that every item goes to exactly one rank.

    With the same number of ranks, each rank reads the state that it saved. With fewer ranks, a rank reads the states of
    several saved ranks. With more ranks, it reads every n-th item of one state.

    Returns the numbers of the saved ranks that rank `mine` reads, the index of the first item to take, and n.
    """
    if before >= count:
        return list(range(mine, before, count)), 0, 1
    return [mine % before], mine // before, len(range(mine % before, count, before))
