"""`--dry-run` of a training: prints the counts of its settings, and the memory plan on the GPUs of this machine."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from spmdrl.config.dump import redact_text
from spmdrl.config.load import Loaded
from spmdrl.config.plan import plan_lines
from spmdrl.config.rewards import is_service, runs_programs
from spmdrl.config.schema import Config
from spmdrl.plan.dry_data import with_data
from spmdrl.plan.gpus import GPUS, Gpu
from spmdrl.plan.run import GIB
from spmdrl.session.job import Job, ranks_of_job, show
from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import open_for

ASK = (
    "import json, torch; ok = torch.cuda.is_available(); "
    "print(json.dumps([torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1], torch.cuda.device_count()] "
    "if ok else None))"
)
HOW = "memory   for GPUs: python -m spmdrl.plan with these settings and --world {} --gpu h100 (or {}, or a file)"


def dry_run(job: Job[Any], loaded: Loaded[Any]) -> None:
    """Print the settings, the plan with its memory, and what the first rows give."""
    show(loaded.config, with_data(dry_lines)(loaded.config, ranks_of_job()))


def dry_lines(cfg: Config, world: int) -> list[str]:
    """Return the counts of a run, and on rank 0 its memory plan on GPUs like this machine's.

    Without a GPU, or for a run on the CPU, one line tells how to plan for one.
    """
    lines = plan_lines(cfg, world)
    if os.environ.get("RANK", "0") != "0":
        return lines
    lines += sandbox_lines(cfg)
    device = None if cfg.run.device == "cpu" else this_gpu()
    if device is None:
        return [*lines, HOW.format(world, ", ".join(name for name in GPUS if name != "h100"))]
    from spmdrl.plan.report import text_of
    from spmdrl.plan.run import plan

    try:
        planned = text_of(plan(cfg, world, device)).split("\n")
    except (ValueError, OSError, RuntimeError) as error:
        return [*lines, f"memory   not planned: {str(error).strip().splitlines()[-1]}"]
    return [*lines, *(line for line in planned if line not in lines)]


def sandbox_lines(cfg: Config) -> list[str]:
    """Return the sandbox that the rewards of a run would use on this machine; nothing if they run no programs."""
    if os.environ.get("RANK", "0") != "0" or not runs_programs(cfg.reward):
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
    """Return this machine's first GPU with the memory that CUDA reports; None without one.

    A separate process queries CUDA, because simulated ranks are forked, and CUDA does not survive a fork. Rates are
    known for the GPUs of `gpus.py`; those of others count as infinite, so that their plans have no times.
    """
    query = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    found = json.loads(query.stdout.strip().splitlines()[-1]) if query.returncode == 0 else None
    return device_of(*found) if found else None


def device_of(name: str, memory: int, count: int) -> Gpu:
    """Describe a GPU by the facts that CUDA reports: its name, its bytes, and the number of GPUs on this node."""
    known = next((gpu for key, gpu in GPUS.items() if key.upper() in name.upper().split()), None)
    endless = Gpu(name, 1.0, math.inf, math.inf, math.inf, math.inf)
    return replace(known or endless, name=name, memory_gib=round(memory / GIB, 2), gpus_per_node=count)
