"""Session of a job on one rank: settings, ranks, timer, console and run folder."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from spmdrl.config.paths import run_folder
from spmdrl.config.schema import TrainingConfig
from spmdrl.health.status import rank_status
from spmdrl.spmd.world import World
from spmdrl.tracking.console import Console
from spmdrl.tracking.metrics import Timer

log = logging.getLogger("spmdrl")


C = TypeVar("C", bound=TrainingConfig, covariant=True)


@dataclass
class Session(Generic[C]):
    """Settings, ranks, timer and console of a job on one rank. `open_run` creates it for all kinds of jobs."""

    cfg: C
    world: World
    timer: Timer
    console: Console | None = None
    """The console on rank 0; None on other ranks."""

    @property
    def folder(self) -> Path:
        """The run folder, which contains checkpoints, metrics and logs."""
        return run_folder(self.cfg)

    def note(self, text: str) -> None:
        """Write one line to this rank's log, and on rank 0 also to the console."""
        log.info(text)
        if self.console:
            self.console.note(text)

    def warn(self, text: str) -> None:
        """Write a warning to this rank's log, and on rank 0 also to the console."""
        log.warning(text, extra={"file_only": True})
        if self.console:
            self.console.note(f"warning: {text}")

    def steps(self, first: int) -> Iterator[int]:
        """Yield the steps (0-based) starting at `first`, and record the current step in the rank's status."""
        for step in range(first, self.cfg.run.steps):
            rank_status.step = step + 1
            yield step
            rank_status.done = step + 1

    def finish(self, lines: list[str]) -> None:
        """Print final lines and the result paths to the console."""
        latest = self.folder / "checkpoints" / "latest"
        saved = latest if latest.exists() else "none"
        if self.console:
            self.console.finish(
                [*lines, f"run {self.folder}  checkpoint {saved}  curves {self.folder / 'metrics.jsonl'}"]
            )
