"""`run` and `succeed` of runner.py without the seconds that imports take: a server that has them forks the ranks.

Each rank is a process of its own, in a session of its own, that runs `python -m MODULE ARGS` with the environment that
torchrun would give it; torchrun itself is not there. Tests about torchrun, signals and deaths take runner.py.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import runpy
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import psutil
import torch.distributed as dist

from recipes import stages
from tests.e2e import runner
from tests.e2e.runner import ROOT, Ended, Job, environment
from tests.ranks.harness import PRELOAD

_PR_SET_PDEATHSIG = 1
MODULES = [name for name in PRELOAD if name != "spmdrl.train"] + ["spmdrl.rl.build", "transformers.modeling_utils"]
"""Entry points are left out: `python -m` runs them anew."""


def _child(folder: str, module: str, args: list[str], env: dict, cwd: str) -> None:
    # The server ends with the test process, and its ranks with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    sys.path[:0] = [path for path in (cwd, *env["PYTHONPATH"].split(":")) if path not in sys.path]
    if "torch" in sys.modules:
        import torch

        # The environment sets this where torch is imported afresh.
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


class WarmJob(Job):
    """A running job whose ranks are forked."""

    def __init__(
        self,
        args: Sequence[str],
        ranks: int = 0,
        module: str = "spmdrl.train",
        env: dict | None = None,
        cwd: Path = ROOT,
    ):
        """ranks: 0 for a plain process."""
        self.mark, self.folder = secrets.token_hex(8), tempfile.TemporaryDirectory(prefix="spmdrl_warm_")
        self.out: list[str] = []
        self.err: list[str] = []
        self.stamps: list[float] = []
        context = multiprocessing.get_context("forkserver")
        # This has no effect once the server runs.
        context.set_forkserver_preload(MODULES)
        self.began = time.time()
        self.processes = []
        # torchrun's agent does the same: the store outlives every rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        port = self.store.port if self.store else 0
        for rank in range(max(1, ranks)):
            given = environment(self.mark) | (self._of_rank(rank, ranks, port) if ranks else {}) | (env or {})
            words = [str(arg) for arg in args]
            process = context.Process(target=_child, args=(self.folder.name, module, words, given, str(cwd)))
            process.start()
            self.processes.append(process)
        self.over = threading.Event()
        self.reader = threading.Thread(target=self._follow, daemon=True)
        self.reader.start()

    @staticmethod
    def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        return {name: str(value) for name, value in values.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _follow(self) -> None:
        """Collects lines with their time of arrival."""
        rest, at = {"out": "", "err": ""}, {"out": 0, "err": 0}
        last = False
        while not last:
            last = self.over.wait(0.02)
            for name, lines in (("out", self.out), ("err", self.err)):
                with contextlib.suppress(FileNotFoundError), open(f"{self.folder.name}/{name}", "rb") as file:
                    file.seek(at[name])
                    text = file.read()
                    at[name] += len(text)
                    *whole, rest[name] = (rest[name] + text.decode(errors="replace")).split("\n")
                    whole += [rest[name]] if last and rest[name] else []
                    lines += whole
                    self.stamps += [time.time()] * len(whole) * (name == "err")

    def family(self) -> list[psutil.Process]:
        """All living processes of the job: its ranks, and their children, which carry the mark."""
        pids = {p.pid for p in self.processes if p.is_alive()}
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)] + super().family()

    def _ends_within(self, limit: float) -> bool:
        until = time.time() + limit
        running = list(self.processes)
        while running and time.time() < until:
            wait([p.sentinel for p in running], timeout=until - time.time())
            running = [p for p in running if p.is_alive()]
            if any(p.exitcode for p in self.processes):
                # torchrun does the same when a rank fails.
                for process in running:
                    process.terminate()
        return not running

    def _read_all(self) -> None:
        self.over.set()
        self.reader.join(5)

    def _exit_code(self) -> int:
        return next((p.exitcode for p in self.processes if p.exitcode), 0)

    def _reap(self) -> None:
        for process in self.processes:
            process.join(10)


def _kind(kwargs: dict) -> type[Job]:
    """Chooses the kind of job: those that take input, torchrun or imports of their own start as a user starts them."""
    own = kwargs.keys() & {"stdin", "launch"} or "PYTHONPATH" in (kwargs.get("env") or {})
    return Job if own else WarmJob


def run(args: Sequence[str], limit: float = 120, **kwargs) -> Ended:
    """Starts a job and waits for its end."""
    return runner.run(args, limit, _kind(kwargs), **kwargs)


def succeed(args: Sequence[str], limit: float = 120, **kwargs) -> Ended:
    """Runs a job that must end well and leave nothing behind."""
    return runner.succeed(args, limit, _kind(kwargs), **kwargs)


def recipe(file: Path, *args: object) -> str:
    """Runs a recipe's script in this process, each of its stages as a job; returns what it printed."""

    def stage(job: str, ranks: int, *flags: object) -> None:
        succeed([str(flag) for flag in flags], 170, ranks=ranks if ranks > 1 else 0, module=f"spmdrl.{job}")

    printed, words = io.StringIO(), [str(file), *map(str, args)]
    patched = mock.patch.object(stages, "start", stage), mock.patch.object(sys, "argv", words)
    with patched[0], patched[1], contextlib.redirect_stdout(printed):
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()
