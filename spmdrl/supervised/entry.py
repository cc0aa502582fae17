"""Starts a job on given rows: its sources are read before ranks meet, so that a mistake in them ends it at once."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.config.load import Loaded, exit_with
from spmdrl.config.supervised import supervised_lines
from spmdrl.session.open import open_run
from spmdrl.session.session import Session
from spmdrl.supervised.build import Start, with_steps
from spmdrl.supervised.preview import preview
from spmdrl.supervised.rows import open_mixture
from spmdrl.supervised.template import with_template
from spmdrl.tracking.console import Columns


@dataclass(frozen=True)
class Kind:
    """Parts of a kind of job."""

    prog: str
    """Its command."""
    begin: Callable[[Any], Start]
    build: Callable[[Session[Any]], Any]
    columns: Columns
    """Metrics on the console."""
    lines: Callable[[Any, int], list[str]] = supervised_lines
    """How the counts of the settings multiply out on so many ranks."""
    keeps: bool = True
    """The run folder records its settings; False: of a job that trains nothing."""


def launch(loaded: Loaded[Any], kind: Kind, train: Callable[[Any], None]) -> None:
    """Open the job and train, or show what it would do; any failure ends the whole job by name."""
    try:
        mixture = open_mixture(loaded.config)
        config = with_steps(loaded.config, mixture)
        loaded = dataclasses.replace(loaded, config=with_template(config, kind.begin, mixture))
        begun = kind.begin(loaded.config) if loaded.dry_run else None
        seen = preview(begun.encode, begun.tokenizer, open_mixture(config)) if begun else []
    except ValueError as error:
        exit_with(f"{kind.prog}: {error}")
    plan = lambda cfg, size: kind.lines(cfg, size) + seen  # noqa: E731
    with open_run(loaded, kind.build, plan, kind.keeps, kind.columns) as run:
        if run is not None:
            train(run)
