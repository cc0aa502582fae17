"""The kinds of jobs: each entry point declares one as a row, `JOB`, from which everything else about it follows."""

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
    """Return the function `module:name`, which is imported when it is called: settings are checked before torch."""
    module, _, attribute = name.partition(":")

    def call(*args: Any) -> Any:
        return getattr(import_module(module), attribute)(*args)

    call.__qualname__ = name
    return call


@dataclass(frozen=True)
class Job(Generic[C]):
    """A kind of job: its command, its settings, how it is built and what it shows.

    Functions that need torch are given by `late`. Another kind that differs in some of these is made by `replace`.
    """

    module: str
    """The entry point, which `python -m` takes."""
    page: str
    """Its page of the docs."""
    settings: type[C]
    check: Callable[..., None]
    """(settings, ranks of the job) -> None. Raises ConfigError, which lists every problem. Jobs with a method also take
    `here`: False if the job is only planned on this machine."""
    lines: Callable[[Any, int], list[str]]
    """(settings, ranks) -> the products of the settings' counts, printed at the start and by `--dry-run`."""
    build: Callable[..., Any]
    """(session) -> the job, after the ranks have connected and the run folder is locked; a job with a method gets it as
    the second argument. Collective."""
    train: Callable[[Any], None]
    """The loop over its steps."""
    dry: Callable[["Job[C]", Loaded[C]], None]
    """Prints the output of `--dry-run`. Raises ValueError if the job would not start."""
    columns: Sequence[str]
    """Metrics on the console in their order; those of an evaluation only if it was measured."""
    phases: Sequence[str]
    """Phases of the loop whose times the console shows, in the order of a step."""
    reads: Callable[[], tuple[type, ...]] = tuple
    """Settings of other kinds of jobs whose files it reads."""
    method: Callable[[Any], Any] | None = None
    """(run) -> the learning method of a job that samples (`rl/run.py`), for the run and for its plan on paper."""
    begin: Callable[[C], Any] | None = None
    """For jobs on given rows: reads the tokenizer, and finds the encoder of the rows."""
    settle: Callable[["Job[C]", Loaded[C]], Loaded[Any]] = lambda job, loaded: loaded
    """Completes the settings from the data before ranks connect. Raises ValueError for a user's mistake."""
    keeps: Callable[[Any], bool] = lambda cfg: True
    """True if the run folder belongs to the job alone and records its settings; False: it only holds its log."""

    @property
    def prog(self) -> str:
        """Its command."""
        return f"python -m {self.module}"


def show(settings: Any, plan: list[str]) -> None:
    """Print the settings and the plan on rank 0, for `--dry-run`."""
    if os.environ.get("RANK", "0") == "0":
        print(to_yaml(settings) + "\n" + "\n".join(plan))


def ranks_of_job() -> int:
    """Return the number of ranks with which the job was started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def job_of(cfg: Any) -> Job[Any]:
    """Return the kind of job with these settings."""
    return next(job for job in jobs().values() if job.settings is type(cfg))


def jobs() -> dict[str, Job[Any]]:
    """Return all kinds of jobs by module: every module beside `train.py` that declares a JOB."""
    names = [f"spmdrl.{each.name}" for each in pkgutil.iter_modules(spmdrl.__path__) if not each.ispkg]
    found = {name: getattr(import_module(name), "JOB", None) for name in names}
    return {name: job for name, job in found.items() if job is not None}
