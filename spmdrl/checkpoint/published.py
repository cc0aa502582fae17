"""The checkpoints of a run: lists them, finds the newest whole one, publishes one. No communication."""

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
    """Steps of all published checkpoints, newest first."""
    names = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.is_dir() else []
    return sorted({int(m[1]) for m in names if m and m[1] == str(int(m[1]))}, reverse=True)


def newest_valid(root: Path) -> Path | None:
    """The newest checkpoint that verifies, None if there is none at all. Warns of checkpoints that are passed over.

    Raises:
        ValueError: checkpoints exist and none of them verifies.
    """
    return choose(root, ((step, problems(root / f"step_{step}")) for step in steps_saved(root)))


def choose(root: Path, verified: Iterator[tuple[int, list[str]]]) -> Path | None:
    """`newest_valid` of pairs (step, its problems), newest first."""
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
    """Removes folders that a killed job left half written, and puts back those it was about to replace."""
    for path in root.glob(".replaced-step_*") if root.is_dir() else ():
        final = root / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, final)
    for path in root.glob(".incomplete-step_*") if root.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, root: Path, step: int) -> Path:
    """Renames a folder that is whole to `root/step_<step>`, and points `latest` at it."""
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
