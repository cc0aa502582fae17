"""Opens and closes a job on this rank: process group, run folder, logs, console, watchdog."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from spmdrl import checkpoint
from spmdrl.config.dump import to_yaml
from spmdrl.config.load import Loaded
from spmdrl.config.paths import check_run_folder, run_folder
from spmdrl.config.placement import engine_ranks
from spmdrl.config.schema import TrainingConfig
from spmdrl.data.chat import Today
from spmdrl.health.failure import named_exit, watch
from spmdrl.health.preempt import PreemptedError
from spmdrl.health.status import rank_status
from spmdrl.session.determinism import make_deterministic
from spmdrl.session.environ import keep_freed_memory, keep_what_started, share_cores
from spmdrl.session.session import Session
from spmdrl.spmd.devices import without_gpu
from spmdrl.spmd.lockstep import lockstep
from spmdrl.spmd.mesh import start
from spmdrl.spmd.network import choose_interface
from spmdrl.tracking.console import REINFORCED, Columns, Console
from spmdrl.tracking.logs import setup_logging
from spmdrl.tracking.metrics import Timer


class Job(Protocol):
    """A run as `open_run` sees it."""

    def leave(self, left: PreemptedError) -> None:
        """Save what no checkpoint has; the job was asked to go. Collective."""
        ...

    def close(self) -> None:
        """Close files and processes."""
        ...


C = TypeVar("C", bound=TrainingConfig)
J = TypeVar("J", bound=Job)
Plan = Callable[[C, int], list[str]]
"""Lines on how the counts of the settings multiply out on so many ranks."""
Build = Callable[[Session[C]], J]
"""Builds the job once the ranks have met and the run folder is taken. Collective."""


@contextmanager
def open_run(
    loaded: Loaded[C], build: Build[C, J], plan: Plan[C], keeps: bool = True, columns: Columns = REINFORCED
) -> Iterator[J | None]:
    """Opens the job on this rank; gives None for a dry run. A failure inside ends the whole job by name. Collective.

    Args:
        loaded: settings, and whether this is a dry run.
        build: makes the job.
        plan: printed at the start; a dry run prints it and stops.
        keeps: the run folder belongs to this job alone and records its settings. An evaluation only leaves its log.
        columns: metrics on the console.
    """
    cfg = loaded.config
    timer, console, run = Timer(), None, None

    def give_terminal_back() -> None:
        if console:
            console.close()

    with named_exit(lambda: timer.phase, give_terminal_back):
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if loaded.dry_run:
            show(cfg, plan(cfg, size))
            yield None
            return
        make_deterministic(cfg.run)
        folder = run_folder(cfg)
        newest = lambda: next(iter(checkpoint.steps_saved(folder / "checkpoints")), 0)  # noqa: E731
        if not cfg.run.fresh:
            # For whoever fails before the watch begins.
            rank_status.saved = newest
        notes = [choose_interface()]
        # The group first: from here on one rank alone speaks for all when something fails.
        world = start(cfg.parallel, engine_ranks(cfg), cfg.run.device, cfg.run.timeout)
        if world.device.type == "cuda":
            notes.append(share_cores())
        # There is no log file yet, and the last line says it all: Python would print the traceback of a mistake.
        logging.getLogger("spmdrl").addHandler(logging.NullHandler())
        check_run_folder(folder)
        if keeps:
            notes += checkpoint.take_folder(folder, cfg.run.fresh, world, cfg.run.timeout)
        else:
            checkpoint.check_evaluation(folder, world)
        setup_logging(folder, rank)
        watch(world.store, rank, size, cfg.run.timeout, cfg.run.grace, folder, newest, give_terminal_back)
        if keeps:
            notes += checkpoint.check_settings(folder, cfg, world, loaded.given)
        Today.kept = checkpoint.first_day(folder, world)
        if Today.kept != date.today():
            notes.append(f"chat templates that show the date show {Today.kept}, on which this run began first")
        notes.append(settle_on(world.device.type, cfg))
        disable_progress_bar()
        if world.is_first:
            console = Console(cfg.tracking.console, cfg.run.steps, newest(), columns=columns)
            timer = Timer(console.phase)
            for line in [*filter(None, notes), *plan(cfg, size)]:
                console.note(line)
        with lockstep(cfg.run.lockstep_debug, world.store, cfg.run.timeout):
            run = build(Session(cfg, world, timer, console))
            if keeps and world.is_first:
                # Only once everything could be built: a start that fails leaves an existing run folder as it was.
                checkpoint.write_config(folder, cfg)
                checkpoint.write_first_day(folder, Today.kept)
                (folder / "PREEMPTED").unlink(missing_ok=True)
            keep_what_started()
            try:
                yield run
            except PreemptedError as left:
                run.leave(left)
            run.close()
        give_terminal_back()
        with suppress(Exception):
            dist.barrier(group=world.host_group)
        # Engines tear the process group down; leave before they can complain.
        sys.stdout.flush()
        os._exit(0)


def show(settings: Any, plan: list[str]) -> None:
    """Prints the settings and the plan on rank 0, for `--dry-run`."""
    if os.environ.get("RANK", "0") == "0":
        print(to_yaml(settings) + "\n" + "\n".join(plan))


def settle_on(device: str, cfg: TrainingConfig) -> str:
    """Prepare the process for the kind of its device; returns a warning, or nothing."""
    if device == "cpu":
        keep_freed_memory()
        if cfg.run.device == "auto" and (why := without_gpu()):
            return f"warning: this run is on the CPU: {why} (--run.device cpu says that it is meant)"
    return ""
