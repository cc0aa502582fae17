"""One worker of the pool as its parent sees it: process, pipes that never block, and the requests it has."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


LEAVES_WITHIN = 2.0
"""Seconds that an idle process gets to end by itself."""


@dataclass(eq=False)
class Worker:
    """A worker process with its pipes and requests."""

    process: subprocess.Popen
    selector: selectors.BaseSelector
    """Selector that tells when the pipes are ready."""
    spawned: float
    """When it began to load: its process was started, or a row came that needs more (time.monotonic())."""
    ready: bool = False
    """It does not load."""
    queue: deque[int] = field(default_factory=deque)
    """Requests sent and not yet answered, in order: the first may be under way."""
    started: float | None = None
    """When the first of them started (time.monotonic())."""
    may_take: float = 0.0
    """Seconds that it may take, where its reward has clocks of its own."""
    to_send: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    @property
    def stdin(self) -> IO[bytes]:
        """Pipe to the process."""
        return cast(IO[bytes], self.process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        """Pipe from the process."""
        return cast(IO[bytes], self.process.stdout)

    def flush(self) -> None:
        """Write as much as the pipe takes; ask to be woken for the rest."""
        fd = self.stdin.fileno()
        try:
            while self.to_send:
                del self.to_send[: os.write(fd, self.to_send)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.to_send.clear()  # the process ended: reading shows how
        watched = fd in self.selector.get_map()
        if self.to_send and not watched:
            self.selector.register(self.stdin, selectors.EVENT_WRITE, self)
        elif watched and not self.to_send:
            self.selector.unregister(self.stdin)

    def read_lines(self) -> tuple[list[bytes], bool]:
        """Whole lines that came since the last call, and whether the pipe was closed."""
        ended = False
        while True:
            try:
                data = os.read(self.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            self.received += data
            if not data:
                ended = True
                break
        *lines, rest = bytes(self.received).split(b"\n")
        self.received = bytearray(rest)
        return lines, ended

    def leave(self) -> None:
        """Let the process end by itself, which it does at the end of its input, and clear up behind it."""
        if self.stdin.fileno() in self.selector.get_map():
            self.selector.unregister(self.stdin)
        self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVES_WITHIN)

    def kill(self) -> None:
        """Close the pipes and kill the process with its children. May be called twice."""
        for pipe in (self.stdin, self.stdout):
            if not pipe.closed:
                if pipe.fileno() in self.selector.get_map():
                    self.selector.unregister(pipe)
                pipe.close()
        if self.process.returncode is None:  # not reaped, so the id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end(self) -> int:
        """Wait briefly for the end of a process that closed its pipe, and return its exit code, -n for signal n."""
        for _ in range(100):  # wait for the end itself, so that a kill does not hide the exit code
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                break
            time.sleep(0.01)
        self.kill()
        return self.process.returncode


def spawn(selector: selectors.BaseSelector, hello: dict[str, Any]) -> Worker:
    """Start a worker and send it the first line, see `worker.py`; `ready` once it has loaded its function."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spmdrl.rewards.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        bufsize=0,
        start_new_session=True,  # a kill reaches its children too, and Ctrl-C is the caller's to handle
    )
    worker = Worker(process, selector, spawned=time.monotonic())
    os.set_blocking(worker.stdin.fileno(), False)
    os.set_blocking(worker.stdout.fileno(), False)
    selector.register(worker.stdout, selectors.EVENT_READ, worker)
    worker.to_send += (json.dumps(hello) + "\n").encode()
    worker.flush()
    return worker


def _environment() -> dict[str, str]:
    """The caller's environment without the variables that make a process a rank, with one thread and no GPU."""
    env = {
        k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith(("TORCHELASTIC_", "PET_"))
    }
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (root, env.get("PYTHONPATH", "")) if p)
    # the memory of the device is accounted for elsewhere: nothing would see a grader on it
    return env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
