"""Starts and watches the SGLang server process, and sends weights to it over shared memory or by broadcast."""

import json
import logging
import mmap
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
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.health.failure import named_exit
from spmdrl.spmd.checksum import digest
from spmdrl.spmd.mesh import apart_from_default
from spmdrl.weights.reshard import Box, inside

log = logging.getLogger("spmdrl")

GRACE_SECONDS = 3.0
"""Seconds that the main thread of a rank has to notice the engine's death; its own error then names the phase."""
ALIGN = 64
RANK_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")

PROGRESS = re.compile(r"\d%(\||\s+Completed)|\d+it \[|it/s\b|\bs/it\b")
"""Matches a progress bar, even a truncated one."""


class EngineDiedError(RuntimeError):
    """The engine's process has ended."""


def entries(tensors: dict[str, torch.Tensor]) -> list[dict]:
    """List name, type and shape of tensors, and the offset of each in a buffer that contains them one after another."""
    out, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        out.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": at, "bytes": tensor.nbytes})
        at += -(-tensor.nbytes // ALIGN) * ALIGN
    return out


def answers(flat: list[int]) -> list[list[int]]:
    """Split a flat list into the answers of the engine's processes; each answer is preceded by its length."""
    out = []
    while flat:
        out.append(flat[1 : 1 + flat[0]])
        flat = flat[1 + flat[0] :]
    return out


class SharedMemory:
    """Passes weights through unnamed shared memory, which the scheduler process of this rank maps.

    The system frees it even if the job is killed. Parts that the engine does not read are not written, so they use no
    memory.
    """

    def __init__(self):
        self.fd = os.memfd_create("spmdrl-weights")

    def put(self, tensors: dict[str, torch.Tensor], parts: dict[str, list[Box]]) -> dict:
        """Write one bucket; return the message for the process that reads it.

        parts: for each tensor, the boxes that the process reads.
        """
        layout = entries(tensors)
        os.ftruncate(self.fd, 0)
        if layout:
            nbytes = layout[-1]["at"] + layout[-1]["bytes"]
            os.ftruncate(self.fd, nbytes)
            flat = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        for entry, (name, tensor) in zip(layout, tensors.items(), strict=True):
            there = flat[entry["at"] : entry["at"] + entry["bytes"]].view(tensor.dtype).view(tensor.shape)
            for box in parts[name]:
                inside(there, box).copy_(inside(tensor, box))
            entry["parts"] = [[box, int(digest(inside(tensor, box).cpu()))] for box in parts[name]]
        return {"file": f"/proc/{os.getpid()}/fd/{self.fd}", "entries": layout}

    def done(self) -> None:
        """Return the memory to the system."""
        os.ftruncate(self.fd, 0)


class Broadcast:
    """Broadcasts weights over a group of the rank and the engine's processes, which must be on other GPUs than it."""

    def __init__(self, tp: int, backend: str, timeout: float):
        self.tp, self.backend, self.timeout = tp, backend, timedelta(seconds=timeout)
        self.group: dist.ProcessGroup | None = None

    def _join(self, process: "Process") -> dist.ProcessGroup:
        store = dist.TCPStore("127.0.0.1", 0, 1 + self.tp, True, self.timeout, wait_for_workers=False)
        process.send("join", host="127.0.0.1", port=store.port, backend=self.backend)
        # SGLang's processes make the same calls. No public function of torch creates a group with the processes of
        # another program.
        with apart_from_default():
            group, _ = distributed_c10d._new_process_group_helper(
                1 + self.tp,
                0,
                [],
                distributed_c10d.Backend(self.backend),
                dist.PrefixStore("spmdrl", store),
                group_name=distributed_c10d.GroupName("spmdrl"),
                timeout=self.timeout,
            )
        process.answer()
        return cast(dist.ProcessGroup, group)

    def push(self, process: "Process", tensors: dict[str, torch.Tensor]) -> None:
        """Broadcast one bucket. Raises RuntimeError if the engine received other bytes."""
        self.group = self.group or self._join(process)
        layout = entries(tensors)
        for entry, tensor in zip(layout, tensors.values(), strict=True):
            entry["hash"] = int(digest(tensor.cpu()))
        process.send("receive", entries=layout)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # The recorder of `--run.lockstep-debug` cannot follow collectives with ranks of another program.
        with _disable_current_modes():
            for tensor in tensors.values():
                try:
                    self.group.broadcast([tensor.contiguous()], options).wait()
                except RuntimeError as error:
                    process.raise_if_dead(error)
                    raise
        process.answer()

    def done(self) -> None:
        """Do nothing, because the group is kept for the next push."""


class Process:
    """The rank's handle on the server process.

    One thread reads the server's answers and notices when the process ends; another copies its output into the log.
    """

    def __init__(self, python: Path, config: dict, timeout: float):
        self.timeout = timeout
        self.lines: queue.Queue[dict | None] = queue.Queue()
        self.done: list[dict] = []
        self.failed: list[str] = []
        """The server's messages about requests that ended in an error."""
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
        for target in (self._read, self._listen):
            threading.Thread(target=target, daemon=True, name="sglang").start()
        try:
            self.facts: list[int] = self.answer()
        finally:
            # Connected sockets do not need their files, so these are deleted; a killed job then leaves no files behind.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        for line in cast(IO[bytes], self.child.stdout):
            self.lines.put(json.loads(line))
        self.child.wait()
        self.lines.put(None)
        if not self.closing:
            time.sleep(GRACE_SECONDS)
            # The main thread has not noticed the end; it may be in a collective with a rank that waits for this engine.
            with named_exit(lambda: "sampling or after it"):
                raise self.death()

    def _listen(self) -> None:
        for raw in cast(IO[bytes], self.child.stderr):
            for line in lines_of(raw.decode(errors="replace")):
                self.last_output.append(line)
                log.info("sglang: %s", line)

    def death(self) -> EngineDiedError:
        """Return an error that describes the end of the process in one line."""
        code = self.child.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        time.sleep(0.1)  # its last output may still be arriving
        output = list(self.last_output)
        errors = [line for line in output if re.search(r"Error|crashed", line)] or output
        last = f"; its last output, all of which is in the rank's log file: {errors[-1][:300]}" if errors else ""
        return EngineDiedError(f"the SGLang engine (process {self.child.pid}) {how}{last}")

    def raise_if_dead(self, cause: Exception) -> None:
        """Raise EngineDiedError if the process ends shortly after `cause`, which its death would explain."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(GRACE_SECONDS / 2)
            raise self.death() from cause

    def send(self, do: str, **what: Any) -> None:
        """Send a command without waiting."""
        pipe = cast(IO[bytes], self.child.stdin)
        try:
            pipe.write((json.dumps({"do": do, **what}) + "\n").encode())
            pipe.flush()
        except OSError:
            raise self.death() from None

    def take(self, seconds: float) -> dict | None:
        """Return the next line that answers a command, or None; put lines about requests into `done` and `failed`.

        This waits at most `seconds` for the first line.
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
            self.lines.put(None)  # the next call must find the end of the output too
            raise self.death()
        return None

    def answer(self) -> Any:
        """Wait for the answer to a command and return it.

        Raises:
            RuntimeError: the command failed in the server; with the server's message.
            TimeoutError: no answer within the time limit of a collective.
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
        """End the process."""
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
    """Return the environment variables of the server, without torchrun's, which would make the server join the run.

    Values that the user set have priority.
    """
    values = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if config["options"]["device"] == "cpu":
        # The server shares cores with the ranks, so its threads are not bound to cores. Compiling small helpers would
        # take more time than it saves.
        cores = "|".join(["0"] * config["options"]["tp_size"])
        values |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores, "TORCH_COMPILE_DISABLE": "1"}
    return values | {k: v for k, v in os.environ.items() if not RANK_VARIABLES.fullmatch(k)}
