"""Chooses the checkpoints that stay: the newest, those of some steps, the best by a metric. No communication."""

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
    """Checkpoints of steps that are a multiple of it stay. 0: none."""
    best: str = ""
    """Metric whose best checkpoint stays; `-name`: the lowest is best. Empty: none."""

    @property
    def metric(self) -> str:
        """Name of that metric."""
        return self.best.removeprefix("-")


def value_of(root: Path, step: int, metric: str) -> float | None:
    """Value of a metric that was measured of a checkpoint's own weights; None where it never was."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return float(json.loads((root / "measured.json").read_text())[str(step)][metric])
    return None


def measured(root: Path, step: int, values: Mapping[str, float]) -> None:
    """Notes the metrics of a step's checkpoint, and drops those of later steps, which belong to another course."""
    told: dict = {}
    with suppress(OSError, ValueError):
        told = json.loads((root / "measured.json").read_text())
    kept = {k: v for k, v in told.items() if k.isdecimal() and int(k) < step} if isinstance(told, dict) else {}
    write_text(root / "measured.json", json.dumps(kept | {str(step): dict(values)}, indent=1))


def best_of(root: Path, steps: list[int], best: str) -> int | None:
    """The step whose checkpoint has the best value, the first that had it; None where none was measured."""
    sign = -1.0 if best.startswith("-") else 1.0
    known = [(sign * v, -s) for s in steps if (v := value_of(root, s, best.removeprefix("-"))) is not None and v == v]
    return -max(known)[1] if known else None


def prune(root: Path, step: int, keep: Keep) -> list[int]:
    """Makes room once the checkpoint of `step` has verified; returns the steps that went.

    Only checkpoints before that one go: a newer folder was passed over as damaged and will be written again.
    """
    older = [s for s in steps_saved(root) if s < step]
    stay = set(older[: max(keep.newest, 1) - 1])
    stay |= {s for s in older if keep.every and s % keep.every == 0}
    if keep.best:
        # The checkpoint of `step` itself is not measured yet, and stays anyway.
        stay |= {best_of(root, older, keep.best) or step}
    gone = [s for s in older if s not in stay]
    for old in gone:
        # Renamed first, so that a folder half removed is not taken for a damaged checkpoint.
        away = root / f".incomplete-step_{old}"
        os.replace(root / f"step_{old}", away)
        shutil.rmtree(away, ignore_errors=True)
        tick()
    return gone
