"""Lists a run's checkpoints, finds the newest intact one, publishes one. No communication."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from spmdrl.checkpoint.files import flush
from spmdrl.checkpoint.manifest import problems

log = logging.getLogger("spmdrl")


def steps_saved(root: Path) -> list[int]:
    """Return the steps of all published checkpoints, newest first."""
    names = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.is_dir() else []
    return sorted({int(m[1]) for m in names if m and m[1] == str(int(m[1]))}, reverse=True)


def newest_valid(root: Path) -> Path | None:
    """Return the newest checkpoint that verifies, None if there are no checkpoints; warns of damaged ones.

    Raises:
        ValueError: all checkpoints are damaged.
    """
    return choose(root, ((step, problems(root / f"step_{step}")) for step in steps_saved(root)))


def choose(root: Path, verified: Iterator[tuple[int, list[str]]]) -> Path | None:
    """Return `newest_valid` of pairs (step, its problems), newest first."""
    bad = []
    for step, wrong in verified:
        if not wrong:
            if bad:
                log.warning("%s; resuming from step_%d", "; ".join(bad), step)
            return root / f"step_{step}"
        bad.append(f"checkpoint {root / f'step_{step}'} is damaged ({wrong[0]})")
    if bad:
        raise ValueError("; ".join(bad) + ". None is usable: move the folder away, or choose another --run.dir")
    return None


def clean(root: Path) -> None:
    """Remove folders that a killed job left incomplete, and put back those that it was about to replace."""
    for path in root.glob(".replaced-step_*") if root.is_dir() else ():
        final = root / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, final)
    for path in root.glob(".incomplete-step_*") if root.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, root: Path, step: int) -> Path:
    """Rename a complete folder to `root/step_<step>`, and point `latest` at it."""
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
    return final
