"""Starts a real job as a user does, watches it, and ends it whatever it does.

A job and all that it starts carry a mark in their environment: that is how a leftover process is found and ended.
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.documented import check_documented

ROOT = Path(__file__).resolve().parents[2]
MARK = "SPMDRL_TEST_JOB"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GONE_WITHIN = 10.0
"""Law 6: seconds from a fault to the end of the whole job."""


def argv(text: str) -> list[str]:
    """Splits a command line into words."""
    return text.split()


@dataclass
class Ended:
    """Result of a job: exit code, console, and the times (time.time) of what happened."""

    rc: int
    out: list[str]
    err: list[str]
    stamps: list[float]
    """Time at which each line of err arrived."""
    began: float
    ended: float
    left: list[str] = field(default_factory=list)
    """Command lines of processes that outlived the job."""
    timed_out: bool = False

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def ours(self) -> str:
        """stderr without the lines that torchrun's agent adds when a worker fails."""
        text = re.sub(
            r"^Traceback \(most recent call last\):\n(?:  [^\n]*\n)+"
            r"torch\.distributed\.elastic\S*ChildFailedError:.*?\n=+\n.*?\n=+$",
            "",
            "\n".join(self.err),
            flags=re.DOTALL | re.MULTILINE,
        )
        return re.sub(r"^[EWI]\d{4} .*torch/distributed/.*\n?", "", text, flags=re.MULTILINE)

    @property
    def messages(self) -> list[str]:
        """Last lines of ranks: one for the whole job is the rule."""
        return [line for line in self.ours.splitlines() if re.match(r"spmdrl: rank |python -m spmdrl\.\w+: ", line)]

    def stamp(self, start: str) -> float:
        """Time at which the first line of stderr with this beginning arrived."""
        return next(at for line, at in zip(self.err, self.stamps, strict=True) if line.startswith(start))

    def show(self) -> str:
        """Returns everything, for a failed assert."""
        return "\n".join(
            [
                f"rc {self.rc} after {self.seconds:.1f} s; left: {self.left}",
                "--- stdout",
                *self.out[-40:],
                "--- stderr",
                *self.err[-60:],
            ]
        )


def environment(mark: str) -> dict[str, str]:
    """The environment of a job, with its mark."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in RANK_VARIABLES and not k.startswith(("TORCHELASTIC_", "PET_", "VLLM_"))
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TERM": "dumb",
        "COLUMNS": "200",
        MARK: mark,
    }


class Job:
    """A running job."""

    def __init__(
        self,
        args: Sequence[str],
        ranks: int = 0,
        module: str = "spmdrl.train",
        env: dict | None = None,
        stdin: str | None = None,
        cwd: Path = ROOT,
        launch: Sequence[str] = (),
    ):
        """ranks: 0 for a plain process without torchrun. launch: more words for torchrun."""
        self.mark = secrets.token_hex(8)
        base = environment(self.mark)
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
        if ranks:
            # A port of its own, so that jobs side by side never meet.
            start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *launch]
        command = [sys.executable, *start, "-m", module, *map(str, args)]
        self.began = time.time()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=base | (env or {}),
            text=True,
            errors="replace",
            start_new_session=True,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self.stamps: list[float] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out, []), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err, self.stamps), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        if stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.close()

    @staticmethod
    def _read(stream, lines: list[str], stamps: list[float]) -> None:
        for line in stream:
            stamps.append(time.time())
            lines.append(line.rstrip("\n"))

    def family(self) -> list[psutil.Process]:
        """All living processes that carry the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def rank(self, rank: int) -> psutil.Process:
        """The process of one rank."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank) and "--nproc-per-node" not in process.cmdline():
                    return process
        raise LookupError(f"no process of rank {rank}")

    def wait_for(self, condition, limit: float, what: str):
        """Polls until the condition gives something true; the job must live on meanwhile."""
        until = time.time() + limit
        while time.time() < until:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        ended = self.wait(0)
        raise AssertionError(f"never happened: {what}\n{ended.show()}")

    def wait(self, limit: float) -> Ended:
        """Waits for the end; at the limit, ends the job."""
        timed_out = not self._ends_within(limit)
        ended = time.time()
        # Workers of a reward pool die with their parent, by signal: a moment later.
        for _ in range(20):
            left = [] if timed_out else self.family()
            if not left:
                break
            time.sleep(0.1)
        shown = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                shown.append(" ".join(process.cmdline())[:200])
        self.kill()
        self._read_all()
        return Ended(self._exit_code(), self.out, self.err, self.stamps, self.began, ended, shown, timed_out)

    def kill(self) -> None:
        """Ends every process of the job that still lives."""
        for _ in range(3):
            family = self.family()
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=3)
        self._reap()

    # ── what depends on how the job was started ──────────────────────────────

    def _ends_within(self, limit: float) -> bool:
        """Waits for the processes that were started here."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_all(self) -> None:
        """Reads the last lines."""
        for reader in self._readers:
            reader.join(5)

    def _exit_code(self) -> int:
        return self.process.returncode

    def _reap(self) -> None:
        self.process.wait(10)


def run(args: Sequence[str], limit: float = 120, kind: type[Job] = Job, **kwargs) -> Ended:
    """Starts a job and waits for its end."""
    job = kind(args, **kwargs)
    try:
        ended = job.wait(limit)
    finally:
        job.kill()
    assert not ended.timed_out, f"still running after {limit} s\n{ended.show()}"
    return ended


def succeed(args: Sequence[str], limit: float = 120, kind: type[Job] = Job, **kwargs) -> Ended:
    """Runs a job that must end well and leave nothing behind."""
    ended = run(args, limit, kind, **kwargs)
    assert ended.rc == 0, ended.show()
    assert not ended.left, ended.show()
    return ended


def metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    path = Path(folder) / "metrics.jsonl"
    return check_documented([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
