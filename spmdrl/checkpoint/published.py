"""Lists, publishes and removes a run's checkpoints, and finds the best one. Nothing here is collective."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spmdrl.checkpoint.files import flush, write_text
from spmdrl.health.status import tick


@dataclass(frozen=True)
class Keep:
    """Rules for which checkpoints to keep: `--checkpoint.keep`, `--checkpoint.keep-every` and `--checkpoint.best`."""

    newest: int = 2
    """Number of newest checkpoints to keep."""
    every: int = 0
    """Also keep every checkpoint whose step is a multiple of this number. Use 0 to disable this rule."""
    best: str = ""
    """Also keep the best checkpoint by this metric: `name` if higher is better, `-name` if lower is better. Empty to
    disable."""

    @property
    def metric(self) -> str:
        """Name of the metric in `best`, without the sign. Empty if there is no metric."""
        return self.best.removeprefix("-")


def steps_saved(root: Path) -> list[int]:
    """Return the steps of all published checkpoints, newest first."""
    names = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.is_dir() else []
    return sorted({int(m[1]) for m in names if m and m[1] == str(int(m[1]))}, reverse=True)


def clean(root: Path) -> None:
    """Remove a killed job's incomplete checkpoints, and restore the checkpoints that the job was about to replace."""
    for path in root.glob(".replaced-step_*") if root.is_dir() else ():
        final = root / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, final)
    for path in root.glob(".incomplete-step_*") if root.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, root: Path, step: int) -> None:
    """Rename a complete checkpoint's folder to `root/step_<step>`, and point the link `latest` to it."""
    final, before = root / f"step_{step}", root / f".replaced-step_{step}"
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(final, before)
    os.replace(temporary, final)
    link = root / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, root / "latest")
    flush(root)
    shutil.rmtree(before, ignore_errors=True)


def measured_value(root: Path, step: int, metric: str) -> float | None:
    """Return a metric's value for the checkpoint of `step`, or None if it was not measured."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return float(json.loads((root / "measured.json").read_text())[str(step)][metric])
    return None


def record_measured(root: Path, step: int, values: Mapping[str, float]) -> None:
    """Record metrics for the checkpoint of `step`, and drop stale metrics for later steps from before a resume."""
    content: dict = {}
    with suppress(OSError, ValueError):
        content = json.loads((root / "measured.json").read_text())
    earlier = {k: v for k, v in content.items() if k.isdecimal() and int(k) < step} if isinstance(content, dict) else {}
    write_text(root / "measured.json", json.dumps(earlier | {str(step): dict(values)}, indent=1))


def best_step(root: Path, steps: list[int], best: str) -> int | None:
    """Return the step of the best checkpoint by `Keep.best`, or None if none was measured. The earliest wins ties."""
    sign, metric = (-1.0 if best.startswith("-") else 1.0), best.removeprefix("-")
    known = [(sign * v, -s) for s in steps if (v := measured_value(root, s, metric)) is not None and v == v]
    return -max(known)[1] if known else None


def prune(root: Path, step: int, keep: Keep) -> None:
    """Remove checkpoints older than `step`, which has been verified, except those that `keep` selects.

    Checkpoints newer than `step` are kept. A resume skipped them because they are damaged, and the run will overwrite
    them.
    """
    older = [s for s in steps_saved(root) if s < step]
    stay = set(older[: max(keep.newest, 1) - 1])
    stay |= {s for s in older if keep.every and s % keep.every == 0}
    if keep.best:
        # If no older checkpoint was measured, this adds `step`, which is kept anyway.
        stay |= {best_step(root, older, keep.best) or step}
    for old in [s for s in older if s not in stay]:
        # Rename the folder first, so that a partly removed folder is not mistaken for a damaged checkpoint.
        away = root / f".incomplete-step_{old}"
        os.replace(root / f"step_{old}", away)
        shutil.rmtree(away, ignore_errors=True)
        tick()
