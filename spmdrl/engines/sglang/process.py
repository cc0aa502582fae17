"""Starts and watches the SGLang server process."""

import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from spmdrl.health.failure import named_exit

log = logging.getLogger("spmdrl")

GRACE_SECONDS = 3.0
"""Grace period, in seconds, for a rank's main thread to notice that the engine died and raise an error that names the
phase of the step. After that, the thread that reads the engine's output ends the job."""
RANK_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")

PROGRESS = re.compile(r"\d%(\||\s+Completed)|\d+it \[|it/s\b|\bs/it\b")
"""Matches a progress bar, even a truncated one."""


class EngineDiedError(RuntimeError):
    """The engine process has exited."""


def answers(flat: list[int]) -> list[list[int]]:
    """Split a flat list into the answers of the engine's processes. In the list, each answer follows its length."""
    out = []
    while flat:
        out.append(flat[1 : 1 + flat[0]])
        flat = flat[1 + flat[0] :]
    return out


class Process:
    """The rank's handle to the server process.

    One thread reads the server's answers and notices when the process exits. Another thread copies the process's output
    to the log.
    """

    def __init__(self, python: Path, config: dict, timeout: float):
        self.timeout = timeout
        self.lines: queue.Queue[dict | None] = queue.Queue()
        self.done: list[dict] = []
        self.failed: list[str] = []
        """The server's messages about failed requests."""
        self.last_output: deque[str] = deque(maxlen=40)
        self.closing = False
        self.folder = tempfile.mkdtemp(prefix="spmdrl-sglang-")
        script = Path(__file__).with_name("server")
        self.child = subprocess.Popen(
            [str(python), str(script), json.dumps(config | {"parent": os.getpid()})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(config) | {"TMPDIR": self.folder},
        )
        reader, self.listener = (
            threading.Thread(target=target, daemon=True, name="sglang") for target in (self._read, self._listen)
        )
        reader.start()
        self.listener.start()
        try:
            self.facts: list[int] = self.answer()
        finally:
            # Connected sockets do not need their files, which are deleted so that a killed job leaves none behind.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        for line in cast(IO[bytes], self.child.stdout):
            self.lines.put(json.loads(line))
        self.child.wait()
        self.lines.put(None)
        if not self.closing:
            time.sleep(GRACE_SECONDS)
            # The main thread has not noticed the exit. It may be stuck in a collective with a rank that is waiting for
            # this engine.
            with named_exit(lambda: "sampling or after it"):
                raise self.death()

    def _listen(self) -> None:
        for raw in cast(IO[bytes], self.child.stderr):
            for line in lines_of(raw.decode(errors="replace")):
                self.last_output.append(line)
                log.info("sglang: %s", line)

    def death(self) -> EngineDiedError:
        """Return an error that describes in one line how the process exited."""
        code = self.child.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        # The last output may still be arriving. The wait is bounded, because child processes may keep the pipe open.
        self.listener.join(1.0)
        output = list(self.last_output)
        errors = [line for line in output if re.search(r"Error|crashed", line)] or output
        last = f"; its last output, all of which is in the rank's log file: {errors[-1][:300]}" if errors else ""
        return EngineDiedError(f"the SGLang engine (process {self.child.pid}) {how}{last}")

    def raise_if_dead(self, cause: Exception) -> None:
        """Raise EngineDiedError if the process exits shortly after the error `cause`, because the exit then explains
        the error.
        """
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(GRACE_SECONDS / 2)
            raise self.death() from cause

    def send(self, do: str, **what: Any) -> None:
        """Send a command without waiting for the answer."""
        pipe = cast(IO[bytes], self.child.stdin)
        try:
            pipe.write((json.dumps({"do": do, **what}) + "\n").encode())
            pipe.flush()
        except OSError:
            raise self.death() from None

    def take(self, seconds: float) -> dict | None:
        """Return the next answer to a command, or None. Lines about requests are moved to `done` and `failed`.

        Waits at most `seconds` for the first line.

        Raises:
            EngineDiedError: the server has closed its output.
        """
        with suppress(queue.Empty):
            line = self.lines.get(timeout=seconds) if seconds else self.lines.get_nowait()
            while line is not None:
                if "failed" in line:
                    self.failed.append(line["error"])
                elif "done" in line:
                    self.done.append(line)
                else:
                    return line
                line = self.lines.get_nowait()
            self.lines.put(None)  # The next call must find the end of the output too.
            raise self.death()
        return None

    def answer(self) -> Any:
        """Wait for the answer to a command and return it.

        Raises:
            EngineDiedError: the server exited before it answered.
            RuntimeError: the command failed in the server; the error includes the server's message.
            TimeoutError: there was no answer within the timeout of collectives.
        """
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            line = self.take(1.0)
            if line is None:
                continue
            if "error" in line:
                raise RuntimeError(f"SGLang: {line['error']}")
            return line["answer"]
        raise TimeoutError(f"no answer from the SGLang engine (process {self.child.pid}) in {self.timeout:.0f} s")

    def call(self, do: str, **what: Any) -> Any:
        """Send a command and return its answer."""
        self.send(do, **what)
        return self.answer()

    def close(self) -> None:
        """Shut the process down."""
        self.closing = True
        with suppress(OSError):
            cast(IO[bytes], self.child.stdin).close()
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def lines_of(text: str) -> list[str]:
    """Return the non-empty lines of a process's console output, without progress bars."""
    lines = (line.rstrip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not PROGRESS.search(line)]


def environment(config: dict) -> dict[str, str]:
    """Return the server's environment, without torchrun's variables, which would make the server join the run.

    Values set by the user take precedence.
    """
    values = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if config["options"]["device"] == "cpu":
        # The server shares cores with the ranks, so its threads are not pinned. Compiling small helpers would take more
        # time than it saves.
        cores = "|".join(["0"] * config["options"]["tp_size"])
        values |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores, "TORCH_COMPILE_DISABLE": "1"}
    elif config["options"]["dtype"] == "float32":
        # As in vLLM's `set_environment`: Triton would multiply float32 matrices in TF32.
        values["TRITON_F32_DEFAULT"] = "ieee"
    return values | {k: v for k, v in os.environ.items() if not RANK_VARIABLES.fullmatch(k)}
