"""Trackers record the metrics of a run in metrics.jsonl, TensorBoard or wandb. Only rank 0 opens them.

A tracker has `log(step, metrics)` and `close()`; step numbers start at 1. TensorBoard and wandb are imported on demand.
"""

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Methods that a run calls on every tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Write buffered metrics and close the tracker; may be called twice."""


def cut_lines(path: Path, resume_step: int) -> list[str]:
    """Keep only the lines of a JSONL file whose `step` is before resume_step, and return them.

    If no lines remain, the file is renamed to `<name>.old`, or `.old-1`, `.old-2`, ... if that name is taken.
    """
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < resume_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a killed job left an incomplete line
    if not kept:
        set_aside(path)
        return kept
    # The file is replaced by a rename, so that a kill leaves either the old or the new file, never a partial file.
    part = Path(f"{path}.part")
    part.write_text("".join(kept), encoding="utf-8")
    os.replace(part, path)
    return kept


def set_aside(path: Path) -> str:
    """Rename a file to `<name>.old`, or `.old-1`, ... if that name is taken; return the new name without the folder."""
    taken, name = 0, f"{path.name}.old"
    while os.path.lexists(path.with_name(name)):
        taken += 1
        name = f"{path.name}.old-{taken}"
    os.replace(path, path.with_name(name))
    return name


class JsonlTracker:
    """Writes one JSON object per step: `{"step": 3, "reward/mean": 0.5, ...}`, with null for nan and infinity.

    Each line is written at once and flushed, so a reader of a running or killed job sees complete steps. Metrics for
    the same step as the last line, such as those of the final evaluation, are added to that line, so that each step has
    one line.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0) -> None:
        """Open the file for appending, creating its folder if needed.

        resume_step: first step to be logged. Lines for this and later steps, and incomplete lines, are dropped. A file
        with no remaining lines belongs to an older run and is renamed by `set_aside`.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last: dict[str, Any] = {}
        self._last_at = 0
        if self.path.exists() and self.path.stat().st_size and (kept := cut_lines(self.path, resume_step)):
            # A finished run that is restarted evaluates again and adds the result to the file's last line.
            self._last = json.loads(kept[-1])
            self._last_at = self.path.stat().st_size - len(kept[-1].encode())
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line for the step, or add the metrics to the last line if that line belongs to the step."""
        line = {"step": step} | {name: plain(value) for name, value in metrics.items() if name != "step"}
        if self._last.get("step") == step:
            line = self._last | line
            self._file.truncate(self._last_at)
        self._last, self._last_at = line, self.path.stat().st_size
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Writes event files into `<run_dir>/tensorboard`."""

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int = 0) -> None:
        """Open an event file that makes TensorBoard drop earlier records of step `resume_step` and later steps.

        Raises ValueError if tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("tensorboard", error) from error
        self._writer = SummaryWriter(Path(run_dir) / "tensorboard", purge_step=resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every number of a step as a scalar, and flush the file."""
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _id_file(run_dir: str | os.PathLike[str]) -> Path:
    return Path(run_dir) / "wandb" / "spmdrl_id"


def wandb_id(run_dir: str | os.PathLike[str]) -> str:
    """Return the wandb id of the run in this folder, or "" if it has none."""
    file = _id_file(run_dir)
    return file.read_text().strip() if file.exists() else ""


def keep_wandb_id(run_dir: str | os.PathLike[str], run_id: str) -> None:
    """Record the wandb id that the run in this folder continues to use."""
    _id_file(run_dir).parent.mkdir(parents=True, exist_ok=True)
    _id_file(run_dir).write_text(run_id)


class WandbTracker:
    """A wandb run in `<run_dir>/wandb`. Without an API key the run stays offline, for a later `wandb sync`."""

    def __init__(
        self, run_dir: str | os.PathLike[str], project: str, name: str, config: Mapping[str, Any], resume_step: int = 0
    ) -> None:
        """Open a run, or continue the run whose id is in `<run_dir>/wandb/spmdrl_id`; WANDB_MODE sets wandb's mode.

        config: settings without secrets (`dump.to_dict`). resume_step: first step to be logged; if it is above 1, the
        recorded run is continued. wandb keeps the first value of each step, so a step repeated after a resume shows the
        value from before the interruption. Raises ValueError if wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("wandb", error) from error
        if resume_step <= 1 or not wandb_id(run_dir):
            keep_wandb_id(run_dir, secrets.token_hex(6))
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        self._run = wandb.init(
            project=project,
            name=name,
            id=wandb_id(run_dir),
            config=dict(config),
            dir=str(run_dir),
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if mode == "online" else None,
            # By default wandb wraps stdout, and would write over the live panel.
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def close(self) -> None:
        """Finish the run, and wait until its metrics are sent or written."""
        self._run.finish()


def open_trackers(
    names: Sequence[str],
    run_dir: str | os.PathLike[str],
    project: str,
    name: str,
    config_dict: Mapping[str, Any],
    resume_step: int = 0,
) -> list[Tracker]:
    """Open trackers by name, in the order given. Call on rank 0 only.

    names: any of `jsonl`, `tensorboard`, `wandb`. project: wandb's project. name: the run's name. config_dict: settings
    without secrets (`dump.to_dict`). resume_step: first step to be logged (0 or 1 for a new run); records of this and
    later steps are dropped, except in wandb. Raises ValueError for an unknown name, or if a package is not installed.
    """
    opened: list[Tracker] = []
    for kind in dict.fromkeys(names):
        if kind == "jsonl":
            opened.append(JsonlTracker(Path(run_dir) / "metrics.jsonl", resume_step))
        elif kind == "tensorboard":
            opened.append(TensorBoardTracker(run_dir, resume_step))
        elif kind == "wandb":
            opened.append(WandbTracker(run_dir, project, name, config_dict, resume_step))
        else:
            raise ValueError(f"--tracking.trackers {kind}: unknown; valid are jsonl, tensorboard, wandb")
    return opened


def plain(value: Any) -> Any:
    """Return the value, with nan and infinity replaced by None because JSON does not have them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _not_installed(package: str, error: ImportError) -> ValueError:
    return ValueError(
        f"--tracking.trackers {package}: {package} cannot be imported ({error}); "
        f"install it with `pip install {package}` or leave it out of --tracking.trackers"
    )
