"""The kinds of jobs: each entry point declares one as a row, `JOB`, from which everything else about it follows."""

import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import spmdrl
from spmdrl.config.dump import to_yaml
from spmdrl.config.load import Loaded, exit_with, load_or_exit
from spmdrl.session.environ import postpone_collections, prepare

if TYPE_CHECKING:
    from spmdrl.session.session import Session

C = TypeVar("C")


def late(name: str) -> Callable[..., Any]:
    """Return the function `module:name`, which is imported when it is called: torch comes after the settings hold."""
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
    check: Callable[[C, int], None]
    """(settings, ranks of the job) -> None. Raises ConfigError, which lists every problem."""
    lines: Callable[[Any, int], list[str]]
    """How the counts of the settings multiply out on so many ranks: printed at the start and by `--dry-run`."""
    build: Callable[["Session[Any]"], Any]
    """Builds the job once the ranks have met and the run folder is taken. Collective."""
    train: Callable[[Any], None]
    """The loop over its steps."""
    dry: Callable[["Job[C]", Loaded[C]], None]
    """Prints what `--dry-run` shows. Raises ValueError where the job would not start."""
    columns: Sequence[str]
    """Metrics on the console, in the order shown; one of an evaluation only where it was measured."""
    phases: Sequence[str]
    """Phases of the loop whose times the console shows, in the order of a step."""
    reads: Callable[[], tuple[type, ...]] = tuple
    """Settings of other kinds, whose files it reads too."""
    begin: Callable[[C], Any] | None = None
    """Of jobs on given rows: reads the tokenizer, and finds the encoder of the rows."""
    settle: Callable[["Job[C]", Loaded[C]], Loaded[Any]] = lambda job, loaded: loaded
    """Completes the settings by what the data hold, before ranks meet. Raises ValueError for a user's mistake."""
    keeps: Callable[[Any], bool] = lambda cfg: True
    """The run folder belongs to the job alone and records its settings; False: it only leaves its log there."""

    @property
    def prog(self) -> str:
        """Its command."""
        return f"python -m {self.module}"


def launch(job: Job[Any], argv: Sequence[str] | None = None) -> None:
    """Read flags, then build the job and run it, or show what it would do; a failure ends the whole job by name."""
    loaded = load_or_exit(argv, job.prog, job.settings, job.check, job.reads())
    prepare()
    postpone_collections()
    try:
        loaded = job.settle(job, loaded)
        if loaded.dry_run:
            return job.dry(job, loaded)
    except ValueError as error:
        exit_with(f"{job.prog}: {error}")
    from spmdrl.session.open import open_run

    with open_run(job, loaded) as run:
        job.train(run)


def show(settings: Any, plan: list[str]) -> None:
    """Print the settings and the plan on rank 0, for `--dry-run`."""
    if os.environ.get("RANK", "0") == "0":
        print(to_yaml(settings) + "\n" + "\n".join(plan))


def ranks_of_job() -> int:
    """Return the number of ranks with which the job was started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def jobs() -> dict[str, Job[Any]]:
    """Return all kinds of jobs by module: every module beside `train.py` that declares a JOB."""
    names = [f"spmdrl.{each.name}" for each in pkgutil.iter_modules(spmdrl.__path__) if not each.ispkg]
    found = {name: getattr(import_module(name), "JOB", None) for name in names}
    return {name: job for name, job in found.items() if job is not None}
