"""Saves the batch of an anomalous optimizer step, for `python -m spmdrl.tools.replay`.

RUN/spikes/step_000012/rank_00000.safetensors  the sequences of one data position, with all columns
RUN/spikes/step_000012/spike.json              facts about the step, and the names of the files
"""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import torch

from spmdrl.checkpoint import treefile
from spmdrl.config.paths import inside
from spmdrl.data.batch import Batch, concatenate
from spmdrl.policy.grad_guard import AnomalousStep, Guard
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rl.trees import Images, batch_of, batch_tree
from spmdrl.spmd.exchange import all_reduce, lexsort
from spmdrl.spmd.world import World

FILE = "spike.json"
"""Name of the file with facts about the step."""
NAMES = ("step", "model", "share", "updates_done", "on_policy", "algorithm")
"""Keys required in `spike.json`, besides `norm`, `median` and `files`."""


class Spikes:
    """Saves the inputs of each optimizer step that a gradient guard flags as anomalous, on every training rank."""

    def __init__(
        self,
        folder: Path,
        world: World,
        models: Models,
        algo: Algorithm,
        warn: Callable[[str], None],
    ):
        """folder: the run folder. warn: callback that logs a warning."""
        self.folder, self.world, self.algo, self.warn = folder, world, algo, warn
        self.replays = True
        """True if `spmdrl.tools.replay` supports the run's learning method."""
        self.step = 0
        """The current step (1-based), set by the caller."""
        self.guards: dict[str, Guard] = {name: model.guard for name, model in models.learning().items()}
        for name, guard in self.guards.items():
            guard.store = partial(self.keep, name)

    def state(self) -> dict[str, dict]:
        """Return the guards' state as JSON values, for checkpoints."""
        return {name: guard.state() for name, guard in self.guards.items()}

    def restore(self, state: dict[str, dict]) -> None:
        """Restore the guards' state, as returned by `state`."""
        for name, facts in state.items():
            if name in self.guards:
                self.guards[name].restore(facts)

    def keep(self, model: str, seen: AnomalousStep) -> str:
        """Write this rank's part of a step, and return instructions for inspecting the step.

        Collective over the ranks that train.
        """
        name = f"step_{self.step:06d}" + (f"_update_{seen.share}" if seen.share else "")
        place = inside(self.folder, "spikes", name + (f"_{model}" if model != "policy" else ""))
        holders = self.world.holders[:, 0].tolist()
        if self.world.rank == self.world.roles.trainers[0]:
            # An earlier run that was interrupted may have left files of this step.
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
        self._meet()
        if self.world.rank in holders:
            place.mkdir(parents=True, exist_ok=True)
            batch = seen.batch.to(torch.device("cpu"))
            images = Images()
            tree = batch_tree(batch, images)
            treefile.write(place / rank_file(self.world.rank), tree | {"shown": images.tree()})
        # A guard may end the job afterwards, so wait until all ranks have written their files.
        self._meet()
        look = f"python -m spmdrl.tools.replay {place}" if self.replays else f"the batch in {place}"
        if self.world.rank == self.world.roles.trainers[0]:
            facts = {name: value for name, value in vars(seen).items() if name != "batch"} | {
                "step": self.step,
                "model": model,
                "norm": plain(seen.norm),
                "median": plain(seen.median),
                "algorithm": self.algo.state,
                "config": "../../config.yaml",
                "files": [rank_file(rank) for rank in holders],
                "command": look,
            }
            (place / FILE).write_text(json.dumps(facts, indent=1) + "\n")
        if not seen.finite:
            what = "a loss or gradient that is not finite, left out"
        else:
            what = f"gradient norm {seen.norm:.4g}, {seen.norm / seen.median:.0f} times the median {seen.median:.4g}"
        which = "" if model == "policy" else f" of the {model}"
        self.warn(f"step {self.step}, update {seen.share + 1}{which}: {what}; look: {look}")
        return look

    def _meet(self) -> None:
        all_reduce(torch.zeros(1), "sum", self.world.training_group)


def read(place: Path) -> tuple[dict, Batch]:
    """Return the facts about a saved step, and the sequences of all ranks in sample order.

    Raises:
        ValueError: the folder does not exist or is incomplete; the message names the missing file or key.
    """
    try:
        facts = json.loads((place / FILE).read_text(encoding="utf-8"))
        if "unmoved" in facts:
            # Older versions named this key `unmoved`.
            facts["on_policy"] = facts.pop("unmoved")
        files = [str(name) for name in facts["files"]]
        facts |= {name: math.nan if facts[name] is None else float(facts[name]) for name in ("norm", "median")}
        wrong = [name for name in NAMES if name not in facts]
        if wrong or any(Path(name).name != name for name in files) or not files:
            raise ValueError(f"it lacks {', '.join(wrong) or 'names of files in its folder'}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place / FILE}: {error}; name a folder that a run has saved, such as runs/demo/spikes/step_000012"
        ) from error
    parts = [treefile.read(place / name) for name in files]
    try:
        # A file of an earlier version has no images.
        shown = [part.pop("shown", {}) for part in parts]
        batch = reduce(concatenate, [batch_of(part, Images.of(each)) for part, each in zip(parts, shown, strict=True)])
        return facts, batch.select(lexsort(batch.keys))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{place}: its files do not make one batch ({type(error).__name__}: {error})") from error


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes its sequences to."""
    return f"rank_{rank:05d}.safetensors"


def plain(value: float) -> float | str | None:
    """Convert a number to a JSON value: null for nan, and a string for infinity."""
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)
