"""Saves and finds checkpoints as a run does, for tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spmdrl.checkpoint import store
from spmdrl.checkpoint.published import Keep

ALONE: Any = SimpleNamespace(is_first=True, rank=0, size=1, host_group=None)
"""A world of one, without process groups."""


def save(root: Path, step: int, models: Any, state: Any, mine: Any, world: Any, keep=None, config=None) -> Path:
    """Save a checkpoint. Collective."""
    return store.write(root, store.content_of(step, models, state, mine, config=config), world, keep or Keep())


def newest_valid(root: Path) -> Path | None:
    """Return the newest checkpoint that verifies."""
    return store.find_resume(root, ALONE)
