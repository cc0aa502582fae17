"""Describes the kinds of jobs. Each entry point defines a constant `JOB`, from which its jobs are built."""

import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

import spmdrl
from spmdrl.config.dump import to_yaml
from spmdrl.config.load import Loaded

C = TypeVar("C")


def late(name: str) -> Callable[..., Any]:
    """Return a function that imports `module:function` when called, so that checking settings does not import torch."""
    module, _, attribute = name.partition(":")

    def call(*args: Any) -> Any:
        return getattr(import_module(module), attribute)(*args)

    call.__qualname__ = name
    return call


@dataclass(frozen=True)
class Job(Generic[C]):
    """A kind of job: its command, its settings, and functions that build and run it.

    Functions that need torch are wrapped by `late`. Use `dataclasses.replace` to derive a similar kind of job.
    """

    module: str
    """Module of the entry point, for `python -m`."""
    page: str
    """Page of the docs that describes this kind of job."""
    settings: type[C]
    check: Callable[..., None]
    """Takes the settings and the number of ranks, and raises a ConfigError that lists every problem. If the job has a
    `method`, `check` also takes `here`, which is False if the job is only being planned on this machine."""
    lines: Callable[[Any, int], list[str]]
    """Takes the settings and the number of ranks, and returns lines that show derived sizes, such as tokens per rank.
    The lines are printed at startup and by `--dry-run`."""
    build: Callable[..., Any]
    """Takes the session and, if the job has a `method`, the method, and returns the job's `JobRun`. Called once the
    ranks are connected and the run folder is locked. Collective."""
    train: Callable[[Any], None]
    """Takes the `JobRun`, and runs all steps of the job."""
    dry: Callable[["Job[C]", Loaded[C]], None]
    """Takes the job and the loaded settings, and prints the output of `--dry-run`. Raises ValueError if the job cannot
    start."""
    columns: Sequence[str]
    """Metrics shown on the console, in this order. Evaluation metrics are omitted until the first evaluation."""
    phases: Sequence[str]
    """Step phases whose seconds are shown on the console, in this order."""
    reads: Callable[[], tuple[type, ...]] = tuple
    """Returns the settings classes of other kinds of jobs whose config files this kind can read."""
    method: Callable[[Any], Any] | None = None
    """For jobs that sample: takes the run, and returns the learning method (`rl/run.py`). Memory planning (`plan/`)
    also calls this function."""
    begin: Callable[[C], Any] | None = None
    """For jobs that train on given rows: takes the settings, and returns the tokenizer and the row encoder."""
    settle: Callable[["Job[C]", Loaded[C]], Loaded[Any]] = lambda job, loaded: loaded
    """Takes the job and the loaded settings, and returns the settings completed from the data. Called before the ranks
    connect. Raises ValueError for user errors."""
    keeps: Callable[[Any], bool] = lambda cfg: True
    """Takes the settings, and returns True if the job has its own run folder, in which it records its settings. Returns
    False if the job only writes a log to another job's folder."""

    @property
    def prog(self) -> str:
        """The command that starts this kind of job."""
        return f"python -m {self.module}"


def show(settings: Any, plan: list[str]) -> None:
    """Print the settings and the plan on rank 0, for `--dry-run`."""
    if os.environ.get("RANK", "0") == "0":
        print(to_yaml(settings) + "\n" + "\n".join(plan))


def ranks_of_job() -> int:
    """Return the number of ranks in this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def job_of(cfg: Any) -> Job[Any]:
    """Return the kind of job that these settings belong to."""
    return next(job for job in jobs().values() if job.settings is type(cfg))


def jobs() -> dict[str, Job[Any]]:
    """Return all kinds of jobs by module name. Jobs come from the modules next to `train.py` that define `JOB`."""
    names = [f"spmdrl.{each.name}" for each in pkgutil.iter_modules(spmdrl.__path__) if not each.ispkg]
    found = {name: getattr(import_module(name), "JOB", None) for name in names}
    return {name: job for name, job in found.items() if job is not None}
