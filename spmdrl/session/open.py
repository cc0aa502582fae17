"""Opens and closes a job on this rank: process group, run folder, logs, console, watchdog."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from typing import Any

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from spmdrl.checkpoint.folder import (
    check_evaluation,
    check_settings,
    first_day,
    take_folder,
    write_config,
    write_first_day,
)
from spmdrl.checkpoint.published import steps_saved
from spmdrl.config.load import Loaded
from spmdrl.config.paths import check_run_folder, run_folder
from spmdrl.config.schema import TrainingConfig
from spmdrl.data.chat import Today
from spmdrl.health.failure import named_exit, watch
from spmdrl.health.preempt import PreemptedError
from spmdrl.health.status import rank_status
from spmdrl.session.determinism import make_deterministic
from spmdrl.session.environ import keep_freed_memory, keep_what_started, share_cores
from spmdrl.session.job import Job, jobs
from spmdrl.session.session import Session
from spmdrl.spmd.devices import without_gpu
from spmdrl.spmd.lockstep import Lockstep
from spmdrl.spmd.mesh import start
from spmdrl.spmd.network import choose_interface
from spmdrl.spmd.world import World
from spmdrl.tracking.console import Console
from spmdrl.tracking.logs import setup_logging
from spmdrl.tracking.metrics import Timer


@contextmanager
def open_run(job: Job[Any], loaded: Loaded[Any]) -> Iterator[Any]:
    """Open a job on this rank, yield it, and close it. Collective.

    A failure inside the context stops the job on all ranks, with a message that names the failed rank and the cause.
    """
    cfg, keeps = loaded.config, job.keeps(loaded.config)
    timer, console = Timer(), None

    def give_terminal_back() -> None:
        if console:
            console.close()

    with named_exit(lambda: timer.phase, give_terminal_back):
        make_deterministic(cfg.run)
        folder = run_folder(cfg)
        newest = lambda: next(iter(steps_saved(folder / "checkpoints")), 0)  # noqa: E731
        if not cfg.run.fresh:
            # If a failure occurs before the call of `watch`, its message then also names the last saved step.
            rank_status.saved = newest
        # Set up the process group first. Otherwise, every rank would report a failure that all of them share.
        world, notes = _connect(cfg)
        check_run_folder(folder)
        if keeps:
            notes += take_folder(folder, cfg.run.fresh, world, cfg.run.timeout)
        else:
            check_evaluation(folder, world)
        setup_logging(folder, world.rank)
        watch(world.store, world.rank, world.size, cfg.run.timeout, cfg.run.grace, folder, newest, give_terminal_back)
        if keeps:
            kinds = {module: each.settings for module, each in jobs().items()}
            notes += check_settings(folder, cfg, world, loaded.given, kinds)
        Today.first = today = first_day(folder, world)
        if today != date.today():
            notes.append(f"chat templates that contain the date use {today}, the day on which this run first began")
        notes.append(_prepare_for(world.device.type, cfg))
        disable_progress_bar()
        if world.is_first:
            console = Console(cfg.tracking.console, cfg.run.steps, newest(), columns=job.columns, phases=job.phases)
            timer = Timer(console.phase)
            for line in [*filter(None, notes), *job.lines(cfg, world.size)]:
                console.note(line)
        with Lockstep(world.store, cfg.run.timeout) if cfg.run.lockstep_debug else nullcontext():
            session = Session(cfg, world, timer, console)
            run = job.build(session, job.method) if job.method else job.build(session)
            if keeps and world.is_first:
                # Write files after the build, so that a failed start leaves an existing run folder unchanged.
                write_config(folder, cfg)
                write_first_day(folder, today)
                (folder / "PREEMPTED").unlink(missing_ok=True)
            keep_what_started()
            try:
                yield run
            except PreemptedError as left:
                run.leave(left)
            run.close()
        _leave(world, give_terminal_back)


def _connect(cfg: TrainingConfig) -> tuple[World, list[str]]:
    """Connect to the job's other ranks. Return the `World` and notes for the console. Collective."""
    notes = [choose_interface()]
    world = start(cfg.parallel, cfg.engine_ranks, cfg.run.device, cfg.run.timeout)
    if world.device.type == "cuda":
        notes.append(share_cores())
    # Without a handler, Python would print log records, including tracebacks, to stderr until the log file is opened.
    logging.getLogger("spmdrl").addHandler(logging.NullHandler())
    return world, notes


def _prepare_for(device: str, cfg: TrainingConfig) -> str:
    """Prepare the process for its device type; return a warning or an empty string."""
    if device == "cpu":
        keep_freed_memory()
        if cfg.run.device == "auto" and (why := without_gpu()):
            return f"warning: this run is on the CPU: {why} (if this is intended, set --run.device cpu)"
    return ""


def _leave(world: World, give_terminal_back: Callable[[], None]) -> None:
    """Exit the process once all ranks have reached this point."""
    give_terminal_back()
    with suppress(Exception):
        dist.barrier(group=world.host_group)
    # A normal exit would tear down the process group, which makes engines print errors.
    sys.stdout.flush()
    os._exit(0)
