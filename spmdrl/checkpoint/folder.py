"""Locks the run folder when a job starts, and decides whether the job resumes in the folder, moves it aside or refuses
it.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import lock
from spmdrl.checkpoint.files import write_text
from spmdrl.checkpoint.published import steps_saved
from spmdrl.config.dump import to_yaml
from spmdrl.config.paths import recorded_settings
from spmdrl.config.resume import differences, settings_to_record
from spmdrl.config.schema import TrainingConfig
from spmdrl.health.status import rank_status
from spmdrl.spmd.exchange import all_gather_text, gather_names
from spmdrl.spmd.world import World

FIRST_DAY = "first_day"
"""File in the run folder that records the day on which the run was first started."""


def together(act: Callable[[], Any], world: World) -> list[Any]:
    """Call `act` on every rank, and return all ranks' results in rank order. Results must be JSON-serialisable.
    Collective.

    If `act` fails on any rank, every rank raises an error. A failed rank raises its own error, and the other ranks
    raise an error with the message of the first failed rank.
    """
    error = None
    try:
        report = json.dumps([act(), None])
    except Exception as found:
        # A ValueError is a user error with advice, so the other ranks raise a ValueError, too.
        error, report = found, json.dumps([None, [isinstance(found, ValueError), str(found)]])
    reports = [json.loads(text) for text in all_gather_text(report, world.host_group)]
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(reports):
        if failure:
            is_mistake, text = failure
            raise (ValueError if is_mistake else OSError)(f"rank {rank}: {text}")
    return [value for value, _ in reports]


def on_first(act: Callable[[], Any], world: World) -> Any:
    """Call `act` on rank 0 and return its JSON-serialisable result, or raise its error, on all ranks. Collective."""
    return together(lambda: act() if world.is_first else None, world)[0]


def take_folder(folder: Path, fresh: bool, world: World, timeout: float = 600.0) -> list[str]:
    """Lock the run folder for this job until the job ends, and return lines for the user. Collective.

    With `--run.fresh`, a non-empty folder is first moved aside, but nothing is deleted. A job that torchrun or SLURM
    restarted keeps the folder's content even with `--run.fresh`. Call this before anything opens a file in the folder.

    timeout: seconds that the other ranks wait for rank 0. If an exiting job still holds the folder's lock, rank 0
    waits up to `timeout / 2` or `lock.WAIT` seconds, whichever is shorter.

    Raises ValueError if another job is using the folder, or if the folder cannot be created or moved.
    """
    agents = set(gather_names([lock.launcher()], world.host_group)) - {""}

    def taken() -> list[str]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _take(folder, fresh, agents, min(lock.WAIT, timeout / 2))
        except OSError as problem:
            raise ValueError(f"{folder} cannot be written to ({problem}): choose another --run.dir") from problem

    return on_first(taken, world)


def _take(folder: Path, fresh: bool, agents: set[str], wait: float) -> list[str]:
    notes = []
    while lock.held:
        lock.held.pop().release()
    mine = lock.take(folder, wait)
    restarted = lock.same_job(mine.record, agents)
    if fresh and not restarted and any(path.name != lock.NAME for path in folder.iterdir()):
        try:
            notes.append(_move_aside(folder))
            before, mine = mine, lock.take(folder, 0)
        except BaseException:
            mine.release()
            raise
        before.release()
    # A replaced node may come back after a later restart, so the lock file keeps its launcher's name.
    mine.sign(agents | lock.agents_of(mine.record) if restarted else agents)
    lock.held.append(mine)
    return [*notes, f"warning: {mine.warning}"] if mine.warning else notes


def _move_aside(folder: Path) -> str:
    """Rename a run folder, or the target of a link, and create an empty folder in its place. Returns a note for the
    user.
    """
    real = folder.resolve()
    if Path.cwd().is_relative_to(real):
        raise ValueError(
            f"--run.fresh: {real} is or contains the working directory of this program and is not moved: start from "
            "elsewhere, or choose another --run.dir"
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


def check_still_owned(world: World) -> None:
    """Raise TakenError on every rank if another job has taken the run folder. Collective.

    After this error, the job writes nothing more to the folder.
    """
    if problem := on_first(lock.problem, world):
        rank_status.folder = None
        raise lock.TakenError(problem)


def check_evaluation(folder: Path, world: World) -> None:
    """Raise ValueError if an evaluation's folder contains checkpoints that it would resume from. Collective."""
    if on_first(lambda: steps_saved(folder / "checkpoints"), world):
        raise ValueError(
            f"{folder} holds the checkpoints of a run, and an evaluation needs a separate folder, usually "
            "<run folder>-eval: choose another --run.dir (or --run.name)"
        )


def check_settings(
    folder: Path,
    cfg: TrainingConfig,
    world: World,
    given: Collection[str] = (),
    kinds: Mapping[str, type] | None = None,
) -> list[str]:
    """Check that a resumed run has the same settings as its folder, and return lines for the user. Collective.

    given, kinds: as in `differences`.

    Raises ValueError if the folder belongs to another entry point, or if settings that affect results differ and
    `--run.allow-changes` is not set. The message lists these settings.
    """
    return on_first(lambda: _compared_settings(recorded_settings(folder), folder, cfg, given, kinds), world)


def _compared_settings(path: Path, folder: Path, cfg: TrainingConfig, given: Collection[str], kinds) -> list[str]:
    if not path.exists():
        return []
    found = differences(path, cfg, given, kinds)
    if found.other:
        raise ValueError(
            f"{folder} holds a run of {found.other}, which this entry point cannot resume: take another --run.dir (or "
            "--run.name), or --run.fresh (moves that folder aside and starts over)"
        )
    if found.lines and not cfg.run.allow_changes:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(found.lines)}. Take the same settings, another "
            "--run.dir, --run.fresh (moves that folder aside and starts over), or --run.allow-changes (continues with "
            "the new settings)"
        )
    return [*found.notes, "--run.allow-changes: " + "; ".join(found.lines)] if found.lines else found.notes


def write_config(folder: Path, cfg: TrainingConfig) -> None:
    """Write the run's settings to `config.yaml` in the run folder atomically."""
    write_text(folder / "config.yaml", to_yaml(settings_to_record(cfg)))


def first_day(folder: Path, world: World) -> date:
    """Return the day on which the run in `folder` was first started, or today for a new run. Collective.

    Chat templates that include the date use this day, so that a run renders the same tokens after midnight.
    """

    def read() -> str:
        try:
            return date.fromisoformat((folder / FIRST_DAY).read_text(encoding="utf-8").strip()).isoformat()
        except (OSError, ValueError):
            return date.today().isoformat()

    return date.fromisoformat(on_first(read, world))


def write_first_day(folder: Path, day: date) -> None:
    """Record the day on which the run was first started, for `first_day`."""
    write_text(folder / FIRST_DAY, f"{day.isoformat()}\n")
