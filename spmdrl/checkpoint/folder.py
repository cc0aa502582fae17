"""The run folder when a run begins: its content belongs to the same run, or is moved aside, or is refused."""

import json
import os
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path

from spmdrl.checkpoint import lock
from spmdrl.checkpoint.files import write_text
from spmdrl.checkpoint.published import steps_saved
from spmdrl.config.dump import to_yaml
from spmdrl.config.paths import recorded_settings
from spmdrl.config.resume import differences, lasting
from spmdrl.config.schema import TrainingConfig
from spmdrl.health.status import rank_status
from spmdrl.spmd.exchange import broadcast_text, gather_names
from spmdrl.spmd.world import World

FIRST_DAY = "first_day"
"""File in the run folder: the day of the run's first start."""


def take_folder(folder: Path, fresh: bool, world: World, timeout: float = 600.0) -> list[str]:
    """Makes this job the one that writes to the run folder, until it ends; returns lines for the user. Collective.

    With `--run.fresh` a folder that holds something is moved aside first, and nothing deleted. A job that was started
    again (by torchrun, by SLURM) goes on with what it has. Called before anything opens a file in the folder.

    timeout: seconds that the other ranks wait for rank 0. Rank 0 waits for half of that, and no longer than
        `lock.WAIT`, until a job that is ending has released the folder.

    Raises:
        ValueError: another job is at work in it, or it cannot be made or moved.
    """
    agents = set(gather_names([lock.launcher()], world.host_group)) - {""}
    told: dict = {"notes": [], "error": ""}
    if world.is_first:
        try:
            told["notes"] = _take(folder, fresh, agents, min(lock.WAIT, timeout / 2))
        except ValueError as problem:
            told["error"] = str(problem)
        except OSError as problem:
            told["error"] = f"{folder} cannot be written to ({problem}): choose another --run.dir"
    told = json.loads(broadcast_text(json.dumps(told), world.host_group))
    if told["error"]:
        raise ValueError(told["error"])
    return told["notes"]


def _take(folder: Path, fresh: bool, agents: set[str], wait: float) -> list[str]:
    notes = []
    folder.mkdir(parents=True, exist_ok=True)
    while lock.held:
        lock.held.pop().release()
    mine = lock.take(folder, wait)
    again = lock.same_job(mine.told, agents)
    if fresh and not again and any(path.name != lock.NAME for path in folder.iterdir()):
        try:
            notes.append(_move_aside(folder))
            before, mine = mine, lock.take(folder, 0)
        except BaseException:
            mine.release()
            raise
        before.release()
    # A node may have been replaced, and come back.
    mine.sign(agents | lock.agents_of(mine.told) if again else agents)
    lock.held.append(mine)
    return [*notes, f"warning: {mine.warning}"] if mine.warning else notes


def _move_aside(folder: Path) -> str:
    """Moves a run folder aside and puts an empty one in its place; a link's target is moved, to stay on its disk."""
    real = folder.resolve()
    if Path.cwd().is_relative_to(real):
        raise ValueError(
            f"--run.fresh: {real} is the folder that this program was started in, or holds it, and is not moved from "
            "under it: start from elsewhere, or choose another --run.dir"
        )
    taken = 1
    while os.path.lexists(real.with_name(f"{real.name}.old-{taken}")):
        taken += 1
    away = real.with_name(f"{real.name}.old-{taken}")
    try:
        os.rename(real, away)
        real.mkdir()
    except OSError as problem:
        raise ValueError(
            f"--run.fresh: {real} cannot be moved to {away} ({problem}); choose another --run.dir"
        ) from problem
    return f"--run.fresh: {real} is now {away}"


def still_ours(world: World) -> None:
    """Checks that no other job has taken the run folder. Collective.

    Raises:
        TakenError: on every rank, which writes nothing more there.
    """
    said = lock.problem() if world.is_first else ""
    said = broadcast_text(said, world.host_group)
    if said:
        rank_status.folder = None
        raise lock.TakenError(said)


def check_evaluation(folder: Path, world: World) -> None:
    """Checks that an evaluation's folder is not that of a run, from whose checkpoints it would go on. Collective.

    Raises:
        ValueError: it is.
    """
    said = str(len(steps_saved(folder / "checkpoints"))) if world.is_first else ""
    if broadcast_text(said, world.host_group) != "0":
        raise ValueError(
            f"{folder} holds the checkpoints of a run, and an evaluation wants a folder of its own, which is called "
            "<run folder>-eval: give this one another --run.dir (or --run.name)"
        )


def check_settings(
    folder: Path,
    cfg: TrainingConfig,
    world: World,
    given: Collection[str] = (),
    kinds: Mapping[str, type] | None = None,
) -> list[str]:
    """Checks that a run which goes on from its folder has the settings it began with. Collective; returns notes.

    given, kinds: as `differences` takes them.

    Raises:
        ValueError: it is a run of another entry point, or settings that change the answer differ, each one listed,
            unless `--run.allow-changes`.
    """
    told: dict = {"notes": [], "error": ""}
    path = recorded_settings(folder)
    if world.is_first and path.exists():
        found = differences(path, cfg, given, kinds)
        told["notes"] = found.notes
        if found.other:
            told["error"] = (
                f"{folder} holds a run of {found.other}, with which this one cannot go on: take another --run.dir (or "
                "--run.name), or --run.fresh (moves that folder aside and starts over)"
            )
        elif found.lines and cfg.run.allow_changes:
            told["notes"].append("--run.allow-changes: " + "; ".join(found.lines))
        elif found.lines:
            told["error"] = (
                f"{folder} holds a run with other settings: {'; '.join(found.lines)}. Take the same settings, another "
                "--run.dir, --run.fresh (moves that folder aside and starts over), or --run.allow-changes (goes on so)"
            )
    told = json.loads(broadcast_text(json.dumps(told), world.host_group))
    if told["error"]:
        raise ValueError(told["error"])
    return told["notes"]


def write_config(folder: Path, cfg: TrainingConfig) -> None:
    """Writes `config.yaml`, whole or not at all."""
    write_text(folder / "config.yaml", to_yaml(lasting(cfg)))


def first_day(folder: Path, world: World) -> date:
    """Returns the day on which the run of a folder began first, or today where it begins now. Collective.

    Templates that show the date show this one, so that a run which goes on after midnight renders the same tokens.
    """
    told = ""
    if world.is_first:
        try:
            told = date.fromisoformat((folder / FIRST_DAY).read_text(encoding="utf-8").strip()).isoformat()
        except (OSError, ValueError):
            told = date.today().isoformat()
    return date.fromisoformat(broadcast_text(told, world.host_group))


def write_first_day(folder: Path, day: date) -> None:
    """Writes the day for later starts."""
    write_text(folder / FIRST_DAY, f"{day.isoformat()}\n")
