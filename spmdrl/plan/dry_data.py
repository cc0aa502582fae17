"""`--dry-run` of jobs that sample: reads, formats and counts the first rows of their data as a start would."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.config.load import Loaded, exit_with
from spmdrl.config.schema import Config
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.data.row_columns import unread_line
from spmdrl.engines.build import prompt_limit
from spmdrl.hub.resolve import MODELSCOPE, is_hub_name, resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.rewards.load import check_truths
from spmdrl.session.job import Job, ranks_of_job, show
from spmdrl.tracking.console import clean

ROWS = 1000
"""Rows of a source that are read."""
SHOWN = 300
"""Characters of the example that are printed."""


def dry_run(job: Job[Any], loaded: Loaded[Any]) -> None:
    """Print the settings, the plan and what the first rows give."""
    show(loaded.config, with_data(job.lines)(loaded.config, ranks_of_job()))


def with_data(lines: Callable[[Any, int], list[str]], train: bool = True) -> Callable[[Any, int], list[str]]:
    """Extend the lines of a job's plan by those on its data; the dry run fails where the data cannot be used.

    train: False for an evaluation, which reads no training prompts.
    """

    def both(cfg: Any, world: int) -> list[str]:
        plan, (data, problems) = lines(cfg, world), data_lines(cfg, train)
        if problems:
            print("\n".join([*plan, *data]))
            exit_with("--dry-run: the run would not start:\n  " + "\n  ".join(problems))
        return plan + data

    return both


def data_lines(cfg: Config, train: bool = True) -> tuple[list[str], list[str]]:
    """Return lines on the first rows of `--data.train` and `--data.eval`, and reasons why sources cannot be used.

    Only on rank 0. Nothing is downloaded; a line names each model or data set of a hub that is not on this machine.
    """
    if os.environ.get("RANK", "0") != "0":
        return [], []
    folder = _here(cfg.model.path)
    if folder is None:
        return [f"data     not opened: the tokenizer of {cfg.model.path} is not on this machine"], []
    specs = ([cfg.data.train] if train else []) + ([cfg.data.eval] if cfg.eval.every or not train else [])
    out, problems = [], []
    for spec in dict.fromkeys(filter(None, specs)):
        kind, _, rest = spec.partition(":")
        if kind in ("hf", "ms") and not Path(rest.split(":")[0]).expanduser().is_dir():
            out.append(f"data     {spec} is not opened: it may have to be downloaded")
            continue
        try:
            model, trust = resolve(str(folder), cfg.model.trust_remote_code), cfg.model.trust_remote_code
            tokenizer, limit = load_tokenizer(model, trust), prompt_limit(cfg, model)
            prompts = load_prompts(spec, cfg.data, tokenizer, limit, _limit(cfg), bool(cfg.env))
            check_truths(prompts, cfg.reward)
            out += _source_lines(prompts, limit)
        except (ValueError, OSError) as error:
            problems.append(" ".join(str(error).split()))
    return out, problems


def _limit(cfg: Config) -> int:
    return min(cfg.data.limit or ROWS, ROWS)


def _source_lines(prompts: PromptSet, limit: int) -> list[str]:
    count, lengths = len(prompts), [len(prompt.tokens) for prompt in prompts.prompts]
    size = f", of {max(lengths)} tokens at most" if any(lengths) else ""
    long = f"; {prompts.dropped} longer than {limit} tokens are dropped" if prompts.dropped else ""
    out = [f"data     {prompts.source}: the first rows give {count} prompts{size}{long}"]
    if prompts.unread:
        out.append(f"columns  {unread_line(prompts.unread)}")
    if prompts.beside:
        out.append(f"columns  only rewards and environments get {', '.join(prompts.beside)}")
    out += [f"columns  {line}" for line in prompts.left]
    text = prompts.prompts[0].text
    example = "\n         ".join(clean(line, SHOWN) for line in text[:SHOWN].split("\n"))
    return [*out, f"example  {example}{' ...' if len(text) > SHOWN else ''}"] if text else out


def _here(path: str) -> Path | str | None:
    """Return a model's folder, or its name if it needs no hub; None if it is not on this machine."""
    if path.startswith(MODELSCOPE):
        return None
    if not is_hub_name(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # of the hub client: it is not in the cache
        return None
