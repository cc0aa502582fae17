"""Prints the `--dry-run` output of jobs that sample: the sandbox, planned memory use, and the first data rows."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.config.dump import redact_text
from spmdrl.config.load import Loaded, exit_with
from spmdrl.config.rewards import is_service, runs_programs
from spmdrl.config.schema import Config
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.data.row_columns import unread_line
from spmdrl.engines.build import prompt_limit
from spmdrl.hub.resolve import MODELSCOPE, is_hub_name, resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.plan.gpus import GPUS, Gpu
from spmdrl.plan.run import GIB, plan
from spmdrl.rewards.load import check_truths
from spmdrl.session.image_reader import image_reader
from spmdrl.session.job import Job, ranks_of_job, show
from spmdrl.tracking.console import clean
from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import open_for

ROWS = 1000
"""Maximum number of rows that a dry run reads from each prompt source."""
SHOWN = 300
"""Maximum number of characters to print from the example prompt."""
QUERY = (
    "import json, torch; ok = torch.cuda.is_available(); "
    "print(json.dumps([torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1], torch.cuda.device_count()] "
    "if ok else None))"
)


def dry_run(job: Job[Any], loaded: Loaded[Any], run: Config | None = None) -> None:
    """Print the settings, the plan and a summary of the first data rows; exit if the data cannot be used.

    run: the `Config` derived from the job's settings, or None if the settings already are a `Config`.
    """
    cfg = run or loaded.config
    show(loaded.config, dry_lines(job, cfg, ranks_of_job()))


def dry_lines(job: Job[Any], cfg: Config, world: int) -> list[str]:
    """Return the output lines that follow the settings; only rank 0 inspects this machine and the data.

    For an evaluation (a job without a method), memory is not planned and training prompts are not read.
    """
    lines = job.lines(cfg, world)
    if os.environ.get("RANK", "0") != "0":
        return lines
    lines += sandbox_lines(cfg)
    if job.method:
        lines += _memory_lines(job, cfg, world, lines)
    data, problems = data_lines(cfg, bool(job.method))
    if problems:
        print("\n".join([*lines, *data]))
        exit_with("--dry-run: the run would not start:\n  " + "\n  ".join(problems))
    return lines + data


def _memory_lines(job: Job[Any], cfg: Config, world: int, above: list[str]) -> list[str]:
    """Return the lines of a plan that assumes this machine's GPU type.

    For CPU runs, or if there is no GPU, return a line with the command that plans the run.
    """
    device = None if cfg.run.device == "cpu" else this_gpu()
    if device is None:
        name, others = job.module.rpartition(".")[2], ", ".join(name for name in GPUS if name != "h100")
        of = "" if name == "train" else f"--job {name} "
        how = f"python -m spmdrl.plan {of}with these settings and --world {world} --gpu h100 (or {others}, or a file)"
        return [f"memory   for GPUs: {how}"]
    from spmdrl.plan.report import text_of

    try:
        planned = text_of(plan(cfg, world, device)).split("\n")
    except (ValueError, OSError, RuntimeError) as error:
        return [f"memory   not planned: {str(error).strip().splitlines()[-1]}"]
    return [line for line in planned if line not in above]


def sandbox_lines(cfg: Config) -> list[str]:
    """Return a line about this machine's sandbox for rewards, or an empty list if no reward runs programs."""
    if not runs_programs(cfg.reward):
        return []
    if is_service(cfg.sandbox.provider):
        return [f"sandbox  the service at {redact_text(cfg.sandbox.provider)}"]
    try:
        found = open_for(cfg.sandbox.provider)
    except SandboxError as error:
        return [f"sandbox  none: {error}"]
    found.close()
    return [f"sandbox  {found.name}"]


def this_gpu() -> Gpu | None:
    """Return this machine's first GPU with the memory that CUDA reports, or None if there is no GPU.

    CUDA is queried in a separate process: a process that has initialised CUDA must not fork, and planning forks one
    process per simulated rank. A GPU that is not listed in `gpus.py` gets infinite rates, so its plans contain no
    times.
    """
    query = subprocess.run([sys.executable, "-c", QUERY], capture_output=True, text=True, check=False)
    found = json.loads(query.stdout.strip().splitlines()[-1]) if query.returncode == 0 else None
    return device_of(*found) if found else None


def device_of(name: str, memory: int, count: int) -> Gpu:
    """Return a `Gpu` built from what CUDA reports: name, memory in bytes, and number of GPUs on this node."""
    known = next((gpu for key, gpu in GPUS.items() if key.upper() in name.upper().split()), None)
    endless = Gpu(name, 1.0, math.inf, math.inf, math.inf, math.inf)
    return replace(known or endless, name=name, memory_gib=round(memory / GIB, 2), gpus_per_node=count)


def data_lines(cfg: Config, train: bool = True) -> tuple[list[str], list[str]]:
    """Return a summary of the first rows of `--data.train` and `--data.eval`, and an error per unusable source.

    Nothing is downloaded. Data sets on a hub are not opened, and no data is opened if the model's tokenizer is not on
    this machine. The summary has a line for each such case.

    train: False for an evaluation, which does not read `--data.train`.
    """
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
            rows, images = min(cfg.data.limit or ROWS, ROWS), image_reader(model, tokenizer, trust)
            prompts = load_prompts(spec, cfg.data, tokenizer, limit, rows, bool(cfg.env), images=images)
            check_truths(prompts, cfg.reward)
            out += _source_lines(prompts, limit)
        except (ValueError, OSError) as error:
            problems.append(" ".join(str(error).split()))
    return out, problems


def _source_lines(prompts: PromptSet, limit: int) -> list[str]:
    count, lengths = len(prompts), [len(prompt.tokens) for prompt in prompts.prompts]
    size = f", of {max(lengths)} tokens at most" if any(lengths) else ""
    long = f"; dropped as longer than {limit} tokens: {prompts.dropped}" if prompts.dropped else ""
    out = [
        f"data     {prompts.source}: the first rows give {count} {'prompt' if count == 1 else 'prompts'}{size}{long}"
    ]
    if prompts.unread:
        out.append(f"columns  {unread_line(prompts.unread)}")
    if prompts.beside:
        out.append(f"columns  only rewards and environments get {', '.join(prompts.beside)}")
    out += [f"columns  {line}" for line in prompts.left]
    text = prompts.prompts[0].text
    example = "\n         ".join(clean(line, SHOWN) for line in text[:SHOWN].split("\n"))
    return [*out, f"example  {example}{' ...' if len(text) > SHOWN else ''}"] if text else out


def _here(path: str) -> Path | str | None:
    """Return the local folder of a hub model, or None if it is not cached; return any other path unchanged."""
    if path.startswith(MODELSCOPE):
        return None
    if not is_hub_name(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # the hub client raises several exception types if the model is not cached
        return None
