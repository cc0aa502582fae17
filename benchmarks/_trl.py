"""Comparison with TRL: runs two sides in separate Python environments, which take turns step by step."""

import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINS = ["trl==1.16.0", "accelerate==1.15.0"]


def grpo_options(job: Any, folder: Path) -> dict[str, Any]:
    """Return the arguments of TRL's GRPOConfig that follow from a job: samples, tokens, warm-up and counted steps."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "num_generations": job.samples,
        "max_completion_length": job.tokens,
        "max_steps": job.warm + job.steps,
        "learning_rate": job.lr,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "beta": 0.0,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "generation_kwargs": {"min_new_tokens": job.tokens},
    }


class Turns:
    """A rank's side of taking turns: it reports the end of a step and waits until it may run the next one."""

    def __init__(self, folder: Path, side: str):
        self.folder, self.side, self.step, self.began = folder, side, 0, time.perf_counter()
        self.file = folder / f"{side}.{os.environ.get('RANK', '0')}.seconds"

    def arrive(self) -> None:
        """Append the seconds of the step to the rank's file; the first line has the seconds of the start."""
        with open(self.file, "a") as file:
            file.write(f"{time.perf_counter() - self.began}\n")

    def wait(self) -> None:
        """Report the end of a step, and sleep until the next step may begin."""
        self.arrive()
        go = self.folder / f"{self.side}.go.{self.step}"
        while not go.exists():
            time.sleep(0.002)
        self.step, self.began = self.step + 1, time.perf_counter()


def environment() -> dict[str, str]:
    """Return the environment variables of a side: one thread per rank, no network, and the project importable."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_DISABLED": "true",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }


def installed(pin: str) -> bool:
    """Return True if this environment has a package, `name==version`."""
    name, _, wanted = pin.partition("==")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def trl_python(venv: Path) -> Path:
    """Return a Python interpreter that has PINS: this one, or that of TRL's environment.

    If the environment is missing, it is created on top of this one's packages.
    """
    if not venv.exists() and all(installed(pin) for pin in PINS):
        return Path(sys.executable)
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        site = next(venv.glob("lib/python3.*/site-packages"))
        packages = [p for p in sys.path if p.endswith("site-packages")]
        (site / "base.pth").write_text("\n".join(packages) + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *PINS], check=True)
    return python


def start(script: Path, side: str, python: Path, ranks: int, folder: Path) -> subprocess.Popen:
    """Start the ranks of one side: `script --side SIDE FOLDER`."""
    world = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [str(python), *(world if ranks > 1 else []), str(script), "--side", side, str(folder)]
    with open(folder / f"{side}.log", "w") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log)


def seconds_of(folder: Path, side: str, ranks: int) -> list[float]:
    """Return the seconds of the steps that all ranks of a side have finished: the maximum over ranks, start first."""
    files = [folder / f"{side}.{rank}.seconds" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return []
    # Drop the last line, which may be incomplete.
    lines = [[float(x) for x in file.read_text().split("\n")[:-1]] for file in files]
    return [max(each) for each in zip(*lines, strict=False)]


def take_turns(script: Path, sides: dict[str, Path], ranks: int, steps: int, folder: Path) -> None:
    """Run both sides to their ends, so that one runs a step while the other one sleeps, in alternating order.

    sides: Python interpreter of each side by its name.
    """
    running = {side: start(script, side, python, ranks, folder) for side, python in sides.items()}

    def until(side: str, arrivals: int) -> None:
        while len(seconds_of(folder, side, ranks)) < arrivals:
            if running[side].poll() is not None:
                log = (folder / f"{side}.log").read_text()
                raise RuntimeError(f"{side} ended with {running[side].returncode} and this log:\n{log[-3000:]}")
            time.sleep(0.02)

    try:
        for side in sides:
            until(side, 1)
        for step in range(steps):
            for side in sides if step % 2 else reversed(sides):
                (folder / f"{side}.go.{step}").touch()
                until(side, step + 2)
        for side, process in running.items():
            if process.wait(120):
                raise RuntimeError(f"{side} ends with:\n{(folder / f'{side}.log').read_text()[-3000:]}")
    finally:
        for process in running.values():
            process.terminate()
