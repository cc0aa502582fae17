"""What a rank holds from one step to the next beside its models, as a tree for a checkpoint, and back on any world.

Held are groups that were cut short (partial rollouts), experience that was sampled ahead (split placement), the steps
that are replayed, and the states of the random number generators, for a loss or a reward of the user's that draws from
them: the run's own draws are keyed by data. What all ranks know alike (counters of draws and updates, KL coefficient)
stands in the checkpoint's `state/run.json`.

A rank reads what it wrote. On another world the holders' things are dealt out by `dealt`, groups whole, and generators
begin anew.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from spmdrl.config.schema import Config
from spmdrl.data import treefile
from spmdrl.data.batch import Batch
from spmdrl.data.prompts import PromptSet
from spmdrl.data.trajectory import Trajectory
from spmdrl.rl.collect import Group, Part
from spmdrl.rl.experience import Ahead, Experience, Replay
from spmdrl.spmd.mesh import World


@dataclass
class Holder:
    """The parts of a run on this rank that something is held in."""

    cfg: Config
    world: World
    prompts: PromptSet
    ahead: Ahead
    replay: Replay
    greedy: bool
    """A greedy response is sampled to every prompt (`Round.greedy`)."""


def rank_state(holder: Holder) -> dict:
    """This rank's tree (see `data/treefile.py`), taken between two steps. No later step writes into its tensors."""
    world, ahead, buffer = holder.world, holder.ahead, holder.replay.buffer
    samplers = world.roles.samplers
    # An engine's ranks hold the same groups, and its first one the trajectories.
    leads = world.samples and world.engine_tp_rank == 0
    return {
        # leaders: the first rank of each engine.
        "layout": {"size": world.size, "leaders": list(samplers[:: holder.cfg.rollout.tp])},
        "settings": _settings(holder),
        "ahead": {
            "step": ahead.step,
            "draws": ahead.draws,
            "carried": [_group_tree(group) for group in ahead.carried],
            "ready": [_experience_tree(done) for done in ahead.ready],
        }
        if leads
        else None,
        "replay": [(step, _fields(batch)) for step, batch in buffer.entries()] if buffer else [],
        "generators": generator_states(world.device),
    }


def restore(holder: Holder, files: list[Path]) -> str:
    """Put back what `rank_state` told on every rank of the run that saved; what could not be, in words for the user.

    To be called last before the first step: building an engine draws from the generators.

    Args:
        holder: as the run begins, its steps counted from the checkpoint's.
        files: of all ranks that saved, in their order; empty where a checkpoint has none.

    Raises:
        ValueError: a file that cannot be read, or that does not belong to the others or to the step.
    """
    world, rollout = holder.world, holder.cfg.rollout
    held = ["groups that were cut short"] if rollout.partial_steps else []
    held += ["experience that was sampled ahead"] if rollout.staleness else []
    held += ["the steps to be replayed"] if holder.replay.buffer is not None else []
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
    before, now = read(min(world.rank, len(files) - 1))["settings"], _settings(holder)
    changed = [name for name, value in now.items() if before.get(name) != value]
    if changed:
        return "; ".join([*lost, *([_lost(f"other {', '.join(changed)}", held)] if held else [])])
    try:
        if world.samples:
            _restore_ahead(holder, read, layout["leaders"])
        if holder.replay.buffer is not None:
            _restore_replay(holder, read, len(files))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{files[0].parent} was written by another version of this program: {error!r}") from error
    return "; ".join(lost)


def _lost(why: str, what: list[str]) -> str:
    return f"not resumed, as {why}: {', '.join(what)}"


def _settings(holder: Holder) -> dict[str, Any]:
    """What must be as it was for the things held to fit."""
    rollout = holder.cfg.rollout
    return {
        "prompts": holder.prompts.digest(),
        "--rollout.prompts-per-step": rollout.prompts_per_step,
        "--rollout.samples-per-prompt": rollout.samples_per_prompt,
        "--rollout.max-new-tokens": rollout.max_new_tokens,
        "--rollout.routing-replay": rollout.routing_replay,
        "greedy baseline": holder.greedy,
    }


# ── who takes what ───────────────────────────────────────────────────────────


def dealt(mine: int, count: int, before: int) -> tuple[list[int], int, int]:
    """What holder `mine` of `count` takes of what `before` holders had: (their numbers, its share, of how many shares).

    Everything is taken once. As many holders as before: each its own. Fewer: each that of several. More: several share
    what one had, thing by thing in turn.
    """
    if before >= count:
        return list(range(mine, before, count)), 0, 1
    return [mine % before], mine // before, len(range(mine % before, count, before))


def _restore_ahead(holder: Holder, read: Callable[[int], dict], leaders: list[int]) -> None:
    world, ahead = holder.world, holder.ahead
    numbers, share, shares = dealt(world.engine_index, world.engine_count, len(leaders))
    trees = [read(leaders[i])["ahead"] for i in numbers]
    first, steps_ready = trees[0], len(trees[0]["ready"])
    if first["step"] - steps_ready != ahead.step:
        raise ValueError(
            f"experience for step {first['step'] - steps_ready} was saved, and the run goes on at {ahead.step}"
        )
    ahead.draws, ahead.step = first["draws"], first["step"]
    prompts = {prompt.index: prompt for prompt in holder.prompts.prompts}
    carried = [_group(tree, prompts) for one in trees for tree in one["carried"][share::shares]]
    leads = world.engine_tp_rank == 0
    ready: deque[Experience] = deque()
    for same_step in zip(*(one["ready"] for one in trees), strict=True):
        trajectories = [Trajectory(**t) for tree in same_step for t in tree["trajectories"]]
        kept = set(sorted({t.position for t in trajectories})[share::shares])
        # Counted once, and what was alike on all ranks is so again.
        bad = sum(tree["bad_samples"] for tree in same_step) if leads and not share else 0
        done = Experience([t for t in trajectories if leads and t.position in kept], same_step[0]["drawn"], [], bad)
        done.stats.load(same_step[0]["stats"])
        ready.append(done)
    if len(trees) > 1:
        carried.sort(key=lambda group: group.position)
    ahead.carried, ahead.ready = carried, ready


def _restore_replay(holder: Holder, read: Callable[[int], dict], before: int) -> None:
    assert holder.replay.buffer is not None
    numbers, share, shares = dealt(holder.world.rank, holder.world.size, before)
    entries = sorted(((step, Batch(**tree)) for i in numbers for step, tree in read(i)["replay"]), key=lambda e: e[0])
    for step, batch in entries:
        if shares > 1:
            place_B = torch.unique(batch.seq["position"], return_inverse=True)[1]
            batch = batch.select(torch.nonzero(place_B % shares == share).flatten())
        holder.replay.buffer.append(step, [batch])


# ── things as trees ──────────────────────────────────────────────────────────


def _fields(x: Any) -> dict:
    """A dataclass's fields by name, as they are."""
    return {field.name: getattr(x, field.name) for field in fields(x)}


def _group_tree(group: Group) -> dict:
    parts = {
        str(sample): _fields(part)
        | {
            "tokens": torch.tensor(part.tokens, dtype=torch.int64),
            "logp": torch.tensor(part.logp, dtype=torch.float64),
            "versions": torch.tensor(part.versions, dtype=torch.int64),
        }
        for sample, part in group.parts.items()
    }
    return _fields(group) | {"prompt": group.prompt.index, "parts": parts}


def _group(tree: dict, prompts: dict) -> Group:
    lists = ("tokens", "logp", "versions")
    parts = {int(s): Part(**part | {k: part[k].tolist() for k in lists}) for s, part in tree["parts"].items()}
    return Group(**tree | {"prompt": prompts[tree["prompt"]], "parts": parts})


def _experience_tree(done: Experience) -> dict:
    """`carried` is left out: the newest one's is `Ahead.carried`, an older one's is over."""
    return {
        "trajectories": [_fields(t) for t in done.trajectories],
        "drawn": done.drawn,
        "bad_samples": done.bad_samples,
        "stats": done.stats.dump(),
    }


# ── generators ───────────────────────────────────────────────────────────────


def generator_states(device: torch.device) -> dict:
    """Where the generators that belong to the process stand: Python's, NumPy's, torch's, the device's."""
    version, words, rest = random.getstate()
    name, keys, *numbers = numpy.random.get_state(legacy=True)
    states = {
        "python": (version, torch.tensor(words, dtype=torch.int64), rest),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys, "int64")), *numbers),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict, device: torch.device) -> None:
    """Back to `generator_states`; a device's only on such a device."""
    version, words, rest = states["python"]
    random.setstate((version, tuple(words.tolist()), rest))
    name, keys, *numbers = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *numbers))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
