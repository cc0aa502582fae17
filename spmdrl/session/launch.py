"""Launches a job from its command line. Every entry point calls `launch`."""

from collections.abc import Sequence
from typing import Any

from spmdrl.config.load import exit_with, load_or_exit
from spmdrl.session.environ import postpone_collections, prepare
from spmdrl.session.job import Job


def launch(job: Job[Any], argv: Sequence[str] | None = None) -> None:
    """Load and check the settings, then build and run the job or, with `--dry-run`, print its plan.

    A failure on one rank stops the job on all ranks, with a message that names the failed rank.
    """
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
