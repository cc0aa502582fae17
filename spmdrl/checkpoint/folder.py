"""The run folder when a run begins: what is in it belongs to the same run, or is moved aside, or stays as it is."""

import json
import logging
import os
from pathlib import Path

from spmdrl.checkpoint.files import write_text
from spmdrl.config.dump import to_yaml
from spmdrl.config.resume import differences, lasting
from spmdrl.config.schema import Config
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.mesh import World

log = logging.getLogger("spmdrl")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def restarted() -> bool:
    """This process goes on for one of the same job that failed."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS)


def start_over(folder: Path, fresh: bool, world: World) -> str:
    """With `--run.fresh`, move a run folder aside; says where to. Collective, before anything opens a file in it.

    Nothing is deleted. A job that is restarted goes on with what it has.

    Raises:
        ValueError: it cannot be moved.
    """
    said, error = "", ""
    if world.is_first and fresh and not restarted() and folder.is_dir() and any(folder.iterdir()):
        taken = 1
        while folder.with_name(f"{folder.name}.old-{taken}").exists():
            taken += 1
        away = folder.with_name(f"{folder.name}.old-{taken}")
        try:
            os.rename(folder, away)
            said = f"--run.fresh: {folder} is now {away}"
        except OSError as problem:
            error = f"--run.fresh: {folder} cannot be moved to {away} ({problem}); choose another --run.dir"
    answer = json.loads(all_gather_text(json.dumps([said, error]), world.host_group)[0])
    if answer[1]:
        raise ValueError(answer[1])
    return answer[0]


def check_settings(folder: Path, cfg: Config, world: World) -> list[str]:
    """A folder in which a run began goes on with that run's settings. Collective; returns what is to be told.

    Raises:
        ValueError: settings that change the answer differ, each one listed, unless `--run.allow-changes`.
    """
    told: dict = {"notes": [], "error": ""}
    path = folder / "config.yaml"
    if not path.exists():
        path = folder / "checkpoints" / "latest" / "state" / "config.yaml"
    if world.is_first and path.exists():
        found = differences(path, cfg)
        told["notes"] = found.notes
        if found.lines and cfg.run.allow_changes:
            told["notes"].append("--run.allow-changes: " + "; ".join(found.lines))
        elif found.lines:
            told["error"] = (
                f"{folder} holds a run with other settings: {'; '.join(found.lines)}. Take the same settings, another "
                "--run.dir, --run.fresh (moves that folder aside and starts over), or --run.allow-changes (goes on so)"
            )
    told = json.loads(all_gather_text(json.dumps(told), world.host_group)[0])
    if told["error"]:
        raise ValueError(told["error"])
    return told["notes"]


def write_config(folder: Path, cfg: Config) -> None:
    """`config.yaml`, whole or not at all."""
    write_text(folder / "config.yaml", to_yaml(lasting(cfg)))
