"""Reads the sources of jobs on given rows before ranks meet, so that a mistake in them ends the job."""

import dataclasses
from typing import Any

from spmdrl.config.load import Loaded
from spmdrl.session.job import Job, ranks_of_job, show
from spmdrl.supervised.build import with_steps
from spmdrl.supervised.preview import preview
from spmdrl.supervised.rows import open_mixture
from spmdrl.supervised.template import with_template


def settle(job: Job[Any], loaded: Loaded[Any]) -> Loaded[Any]:
    """Return the settings with the number of steps that the rows take, and with a chat template where they need one.

    Raises:
        ValueError: the model's tokenizer or the rows cannot be used.
    """
    assert job.begin is not None, "a job on given rows encodes them"
    mixture = open_mixture(loaded.config)
    config = with_steps(loaded.config, mixture)
    return dataclasses.replace(loaded, config=with_template(config, job.begin, mixture))


def dry_run(job: Job[Any], loaded: Loaded[Any]) -> None:
    """Print the settings, the plan and a look at the first rows. Raises ValueError where every row is refused."""
    assert job.begin is not None, "a job on given rows encodes them"
    config, begun = loaded.config, job.begin(loaded.config)
    seen = preview(begun.encode, begun.tokenizer, open_mixture(config))
    show(config, job.lines(config, ranks_of_job()) + seen)
