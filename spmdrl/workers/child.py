"""The parent's side of a child process, which exchanges JSON lines over pipes that never block the parent.

The child's side is in_child.py. A child dies with the thread that started it.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}
LEAVES_WITHIN = 2.0
"""Grace period in seconds for a process to exit after its input is closed."""


@dataclass(eq=False)
class Child:
    """A child process and its pipes."""

    process: subprocess.Popen
    selector: selectors.BaseSelector
    """Selector that watches the pipes; the `data` of each pipe's key is the child."""
    spawned: float
    """Time (time.monotonic()) when the process was started, or when it last began or finished loading a file."""
    ready: bool = False
    """True if the process has started and is not loading a file."""
    to_send: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to the standard input of the process."""
        return cast(IO[bytes], self.process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from the standard output of the process."""
        return cast(IO[bytes], self.process.stdout)

    def flush(self) -> None:
        """Write as many queued bytes as fit into the pipe. If some are left, the selector watches for space."""
        fd = self.stdin.fileno()
        try:
            while self.to_send:
                del self.to_send[: os.write(fd, self.to_send)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.to_send.clear()  # the process has ended, which `read_lines` will report
        watched = fd in self.selector.get_map()
        if self.to_send and not watched:
            self.selector.register(self.stdin, selectors.EVENT_WRITE, self)
        elif watched and not self.to_send:
            self.selector.unregister(self.stdin)

    def read_lines(self) -> tuple[list[bytes], bool]:
        """Return the complete lines received since the last call, and whether the process has closed the pipe."""
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

    def hang_up(self) -> None:
        """Close the pipe to the process, which makes it exit. Safe to call twice."""
        if not self.stdin.closed:
            if self.stdin.fileno() in self.selector.get_map():
                self.selector.unregister(self.stdin)
            self.stdin.close()

    def await_end(self, within: float) -> None:
        """Wait up to `within` seconds for the process to exit. It is not reaped, so its pid stays valid for `kill`."""
        until = time.monotonic() + within
        while self.process.returncode is None and time.monotonic() < until:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return
            time.sleep(0.01)

    def kill(self) -> None:
        """Close the pipes and kill the process and its children. Safe to call twice."""
        self.hang_up()
        if not self.stdout.closed:
            if self.stdout.fileno() in self.selector.get_map():
                self.selector.unregister(self.stdout)
            self.stdout.close()
        if self.process.returncode is None:  # the process was not reaped, so its pid was not reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end(self) -> str:
        """Wait briefly until a process that closed its pipe exits. Return how it ended, such as `by signal SIGKILL`."""
        self.await_end(1.0)  # killing the process at once would hide its exit code
        self.kill()
        code = self.process.returncode
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}{hint}"


C = TypeVar("C", bound=Child)


def spawn(
    kind: type[C], module: str, selector: selectors.BaseSelector, hello: dict[str, Any], variables: dict, python: str
) -> C:
    """Start `python -m module <pid of this process>`, send it `hello` as one line of JSON, and return the child.

    kind: class of the returned child. selector: selector that will watch the child's pipes. variables: additional
    environment variables. python: Python interpreter for the child, or "" for the interpreter of this process.
    """
    process = subprocess.Popen(
        [python or sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment() | variables,
        bufsize=0,
        start_new_session=True,  # killing the group also kills its children, and Ctrl-C reaches only the caller
    )
    child = kind(process, selector, spawned=time.monotonic())
    os.set_blocking(child.stdin.fileno(), False)
    os.set_blocking(child.stdout.fileno(), False)
    selector.register(child.stdout, selectors.EVENT_READ, child)
    child.to_send += (json.dumps(hello) + "\n").encode()
    child.flush()
    return child


def _environment() -> dict[str, str]:
    """Return a child's environment: that of this process without the rank variables, and with one thread and no GPU."""
    env = {
        k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith(("TORCHELASTIC_", "PET_"))
    }
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (root, env.get("PYTHONPATH", "")) if p)
    # Children get no GPU, because their memory would be missing from the session's GPU memory accounting.
    return env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
