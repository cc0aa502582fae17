"""Chooses the checkpoints to keep: the newest, those of some steps, the best by a metric. No communication."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spmdrl.checkpoint.files import write_text
from spmdrl.checkpoint.published import steps_saved
from spmdrl.health.status import tick


@dataclass(frozen=True)
class Keep:
    """Settings `--checkpoint.keep`, `keep-every` and `best`."""

    newest: int = 2
    every: int = 0
    """Checkpoints of steps that are a multiple of this number are kept. 0: none."""
    best: str = ""
    """Metric whose best checkpoint is kept; `-name`: the lowest is best. Empty: none."""

    @property
    def metric(self) -> str:
        """Name of the metric in `best`."""
        return self.best.removeprefix("-")


def measured_value(root: Path, step: int, metric: str) -> float | None:
    """Return the value of a metric that was measured on a checkpoint's weights; None if it was not."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return float(json.loads((root / "measured.json").read_text())[str(step)][metric])
    return None


def record_measured(root: Path, step: int, values: Mapping[str, float]) -> None:
    """Record the metrics of a step's checkpoint, and drop those of later steps, which an earlier resume left."""
    content: dict = {}
    with suppress(OSError, ValueError):
        content = json.loads((root / "measured.json").read_text())
    kept = {k: v for k, v in content.items() if k.isdecimal() and int(k) < step} if isinstance(content, dict) else {}
    write_text(root / "measured.json", json.dumps(kept | {str(step): dict(values)}, indent=1))


def best_step(root: Path, steps: list[int], best: str) -> int | None:
    """Return the step whose checkpoint has the best value, the first of equal ones; None if none was measured."""
    sign, metric = (-1.0 if best.startswith("-") else 1.0), best.removeprefix("-")
    known = [(sign * v, -s) for s in steps if (v := measured_value(root, s, metric)) is not None and v == v]
    return -max(known)[1] if known else None


def prune(root: Path, step: int, keep: Keep) -> list[int]:
    """Remove older checkpoints once that of `step` has verified; returns the steps removed.

    Newer folders stay: they were skipped as damaged and will be written again.
    """
    older = [s for s in steps_saved(root) if s < step]
    stay = set(older[: max(keep.newest, 1) - 1])
    stay |= {s for s in older if keep.every and s % keep.every == 0}
    if keep.best:
        # The checkpoint of `step` is not measured yet, and is kept anyway.
        stay |= {best_step(root, older, keep.best) or step}
    gone = [s for s in older if s not in stay]
    for old in gone:
        # Renamed first, so that a partly removed folder is not taken for a damaged checkpoint.
        away = root / f".incomplete-step_{old}"
        os.replace(root / f"step_{old}", away)
        shutil.rmtree(away, ignore_errors=True)
        tick()
    return gone
