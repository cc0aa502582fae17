"""Reads the data of supervised jobs before ranks connect, so that mistakes in the data are reported early."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from spmdrl.config.load import Loaded
from spmdrl.config.rules import never_measured
from spmdrl.config.supervised import SupervisedConfig
from spmdrl.data.mixture import Mixture
from spmdrl.session.job import Job, ranks_of_job, show
from spmdrl.supervised.preview import ROWS, preview
from spmdrl.supervised.rows import open_mixture, steps_of_epochs

C = TypeVar("C", bound=SupervisedConfig)


def settle(job: Job[Any], loaded: Loaded[Any]) -> Loaded[Any]:
    """Return the settings with the number of steps filled in and a chat template added if the rows need one.

    Raises:
        ValueError: the model's tokenizer or the rows cannot be used.
    """
    assert job.begin is not None, "a job on given rows encodes them"
    mixture = open_mixture(loaded.config)
    config = with_steps(loaded.config, mixture)
    return replace(loaded, config=with_template(config, job.begin, mixture))


def dry_run(job: Job[Any], loaded: Loaded[Any]) -> None:
    """Print the settings, the plan and a preview of the first rows. Raises the same ValueError as `preview`."""
    assert job.begin is not None, "a job on given rows encodes them"
    config, begun = loaded.config, job.begin(loaded.config)
    seen = preview(begun.encode, begun.tokenizer, open_mixture(config))
    show(config, job.lines(config, ranks_of_job()) + seen)


def with_steps(cfg: C, mixture: Mixture) -> C:
    """Return the settings. If `--run.steps` is 0, it is replaced with the number of steps for `--data.epochs`.

    Raises:
        ValueError: the number of rows is unknown; or `--checkpoint.best` names an evaluation metric, but no evaluation
            before the last step measures a saved checkpoint.
    """
    if cfg.run.steps:
        return cfg
    if mixture.rows is None:
        raise ValueError("--run.steps 0: the number of rows of a stream is not known; give the number of steps")
    steps = steps_of_epochs(cfg, mixture.rows)
    if problems := never_measured(cfg.checkpoint, cfg.eval.every, steps):
        raise ValueError(problems[0])
    return replace(cfg, run=replace(cfg.run, steps=steps))


def with_template(cfg: C, begin: Callable[[C], Any], mixture: Mixture) -> C:
    """Return the settings, with ChatML as the chat template if the tokenizer has none and the first rows need one.

    The added template is recorded with the run and saved with the model. begin: loads the tokenizer and builds the
    encoder (`Job.begin`). mixture: the rows of `--data.train`.

    Raises:
        ValueError: the model's tokenizer cannot be read; or some of the first rows need ChatML while others are
            plain-text pairs, which ChatML would render as dialogues.
    """
    if cfg.data.chat_template or cfg.data.chat == "off":
        return cfg
    begun = begin(cfg)
    if getattr(begun.tokenizer, "chat_template", None):
        return cfg
    given = replace(cfg, data=replace(cfg.data, chat_template="chatml"))
    rendered, as_chat = begin(given).encode, begin(replace(cfg, data=replace(cfg.data, chat="on"))).encode
    drawn = mixture.draw(min(ROWS, mixture.rows or ROWS))
    row = next((each for each in drawn if not _takes(begun.encode, each) and _takes(rendered, each)), None)
    if row is None:
        return cfg
    # Without a template, --data.chat on rejects exactly the rows that a template would render.
    if pair := next((each for each in drawn if _takes(begun.encode, each) and not _takes(as_chat, each)), None):
        raise ValueError(
            f"{row.where} needs a chat template, which the tokenizer lacks, and {pair.where} is a plain pair, which "
            "a template would render as a dialogue: choose one for all rows with --data.chat-template (for example "
            "chatml), or leave one kind of rows out (--data.train)"
        )
    return given


def _takes(encode: Callable[[dict], Any], drawn: Any) -> bool:
    try:
        encode(drawn.read())
    except ValueError:
        return False
    return True
