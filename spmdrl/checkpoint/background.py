"""Writes checkpoints, either synchronously or in a background thread while training continues."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import files, manifest, store
from spmdrl.checkpoint.folder import on_first, together
from spmdrl.checkpoint.published import Keep, best_step, clean, record_measured, steps_saved
from spmdrl.config.schema import TrainingConfig
from spmdrl.health.status import rank_status, tick
from spmdrl.policy.models import Models
from spmdrl.spmd.mesh import twin
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")


class Saver:
    """Writes a run's checkpoints, one at a time. Every rank has a Saver and must make the same calls."""

    def __init__(self, cfg: TrainingConfig, root: Path, world: World):
        """Remove incomplete checkpoints of a killed job. Collective.

        With `--checkpoint.background`, also create process groups for the writer thread. root: the run's
        `checkpoints/`.
        """
        self.cfg, self.root, self.world = cfg, root, world
        self.keep = Keep(cfg.checkpoint.keep, cfg.checkpoint.keep_every, cfg.checkpoint.best)
        self.twin = twin(world, timedelta(seconds=cfg.run.timeout)) if cfg.checkpoint.background else None
        self.metric_logged = False
        """True once a step has logged the metric of `--checkpoint.best`."""
        self.saved = 0
        """Step of the checkpoint that was started last, or 0 before the first checkpoint."""
        self.expected_bytes = 0
        """Estimated size of the next checkpoint, in bytes."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0
        self._numbers: dict[str, float] = {}
        on_first(lambda: clean(root), world)

    def prepare(self, models: Models, warn: Callable[[str], None]) -> None:
        """Compute the files that all checkpoints share, and warn if the disk is too full for a checkpoint. Collective.

        If checkpoints are disabled, this only sets `expected_bytes`. Call this method before training starts. Raises
        ValueError if a model cannot be saved.
        """
        saved = store.saved_models(models)
        self.expected_bytes = sum(model.checkpoint_bytes() for model in saved)
        if not (self.cfg.checkpoint.every or self.cfg.checkpoint.at_end):
            return
        # The first access to `fixed` computes and caches these files.
        together(lambda: bool([model.fixed for model in saved]), self.world)
        if self.world.is_first:
            try:
                files.check_free_space(self.root, self.expected_bytes)
            except files.DiskFullError as error:
                warn(str(error))

    def record_metrics(self, done: int, values: Mapping[str, float]) -> None:
        """Record the `--checkpoint.best` metric that step `done` logged, for the checkpoint of step `done - 1`.

        The value was measured with the weights after step `done - 1`, which are the weights in that checkpoint.
        """
        metric = self.keep.metric
        if not metric or metric not in values:
            return
        self.metric_logged = True
        if self.world.is_first and done > 1 and (self.saved == done - 1 or (self.root / f"step_{done - 1}").is_dir()):
            self.root.mkdir(parents=True, exist_ok=True)
            record_measured(self.root, done - 1, {metric: float(values[metric])})

    def resumed(self) -> None:
        """Set `metric_logged` in a resumed run: True if the `--checkpoint.best` metric was recorded earlier."""
        self.metric_logged = best_step(self.root, steps_saved(self.root), self.keep.best) is not None

    def save(self, step: int, state: dict | None, mine: Any, models: Models) -> None:
        """Save the state after `step` steps, either in the background or before returning. Collective.

        Waits for the previous checkpoint to be written first. state, mine: as in `store.Content`.

        Raises the errors of `store.write`, such as DiskFullError. If a background write fails, the error is raised by
        the next call of `save`, `poll` or `finish`.
        """
        self.finish()
        began, self.saved = time.perf_counter(), step
        content = store.content_of(step, models, state, mine, self.twin is not None, self.cfg)
        content.facts, content.expected_bytes = {"best": self.keep.best}, self.expected_bytes
        if self.keep.metric and not self.metric_logged and self.world.is_first:
            log.warning("--checkpoint.best %s: no step has logged it so far; see metrics.jsonl", self.keep.best)
        if self.twin is None:
            store.write(self.root, content, self.world, self.keep)
            self._after()
            return
        log.info("step_%d copied for its checkpoint in %.3f s", step, time.perf_counter() - began)
        self._thread = threading.Thread(
            target=self._write, args=(content, self.twin), daemon=True, name=f"checkpoint step_{step}"
        )
        self._thread.start()

    def _write(self, content: store.Content, world: World) -> None:
        began = time.perf_counter()
        try:
            store.write(self.root, content, world, self.keep)
            self._after()
        except BaseException as error:
            self._error = error
        self._seconds = time.perf_counter() - began

    def _after(self) -> None:
        """On rank 0, use the size of the checkpoint just written as the estimate for the next one."""
        if self.world.is_first:
            self.expected_bytes = manifest.read_manifest(self.root / f"step_{self.saved}")["bytes"]

    def poll(self) -> dict[str, float]:
        """Return `time/checkpoint_write`, the duration in seconds, once after each background write. All other calls
        return {}.

        This method is not collective, because ranks may notice the end at different steps. Raises the error if the
        write failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.finish()
        numbers, self._numbers = self._numbers, {}
        return numbers

    def finish(self) -> None:
        """Wait for a pending background write to publish its checkpoint. Must be called on all ranks.

        If the write failed, raises its error: a ValueError is raised unchanged, and any other error becomes the cause
        of a RuntimeError.
        """
        if self._thread is None:
            return
        while self._thread.is_alive():
            before = rank_status.side_count
            self._thread.join(1.0)
            if rank_status.side_count != before:
                # The writer thread made progress, so this waiting thread is not stuck either.
                tick()
        self._thread = None
        error, self._error = self._error, None
        if isinstance(error, ValueError):
            raise error
        if error is not None:
            raise RuntimeError(
                f"checkpoint step_{self.saved} could not be written in the background: {type(error).__name__}: {error}"
            ) from error
        self._numbers = {"time/checkpoint_write": self._seconds}
