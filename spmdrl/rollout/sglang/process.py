"""What a rank needs to run SGLang as a process of its own: the process, and two ways for weights to get there."""

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
import xxhash
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.health.failure import named_exit
from spmdrl.spmd.groups import apart_from_default
from spmdrl.weights.reshard import Box, inside

log = logging.getLogger("spmdrl")

GRACE_SECONDS = 3.0
"""After the engine died: time for the rank to notice by itself, in the middle of which phase it may be."""
ALIGN = 64
RANK_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")

PROGRESS = re.compile(r"\d%(\||\s+Completed)|\d+it \[|it/s\b|\bs/it\b")
"""A progress bar, also one that was cut off."""


class EngineDiedError(RuntimeError):
    """The engine's process is gone."""


def entries(tensors: dict[str, torch.Tensor]) -> list[dict]:
    """Name, type and shape of tensors, and where each begins when they lie end to end."""
    out, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        out.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": at, "bytes": tensor.nbytes})
        at += -(-tensor.nbytes // ALIGN) * ALIGN
    return out


def hash_of(tensor: torch.Tensor) -> int:
    """xxh3 of the bytes, 64 bits: what the engine's processes compare with what they read."""
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def answers(flat: list[int]) -> list[list[int]]:
    """What each of the engine's processes said, of numbers that stand behind their counts."""
    out = []
    while flat:
        out.append(flat[1 : 1 + flat[0]])
        flat = flat[1 + flat[0] :]
    return out


class SharedMemory:
    """Weights through memory without a name, which the engine's process of this rank maps.

    Nothing is left when a job is killed. What the engine does not read is not written, and takes no memory.
    """

    def __init__(self):
        self.fd = os.memfd_create("spmdrl-weights")

    def put(self, tensors: dict[str, torch.Tensor], parts: dict[str, list[Box]]) -> dict:
        """One bucket; returns what its reader has to know. parts: of each tensor, what is read."""
        told = entries(tensors)
        os.ftruncate(self.fd, 0)
        if told:
            nbytes = told[-1]["at"] + told[-1]["bytes"]
            os.ftruncate(self.fd, nbytes)
            flat = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        for entry, (name, tensor) in zip(told, tensors.items(), strict=True):
            there = flat[entry["at"] : entry["at"] + entry["bytes"]].view(tensor.dtype).view(tensor.shape)
            for box in parts[name]:
                inside(there, box).copy_(inside(tensor, box))
            entry["parts"] = [[box, hash_of(inside(tensor, box))] for box in parts[name]]
        return {"file": f"/proc/{os.getpid()}/fd/{self.fd}", "entries": told}

    def done(self) -> None:
        """Give the memory back to the system."""
        os.ftruncate(self.fd, 0)


class Broadcast:
    """Weights over a process group of the rank and the engine's processes; on GPUs these must be other ones."""

    def __init__(self, tp: int, backend: str, timeout: float):
        self.tp, self.backend, self.timeout = tp, backend, timedelta(seconds=timeout)
        self.group: dist.ProcessGroup | None = None

    def _join(self, process: "Process") -> dist.ProcessGroup:
        store = dist.TCPStore("127.0.0.1", 0, 1 + self.tp, True, self.timeout, wait_for_workers=False)
        process.send("join", host="127.0.0.1", port=store.port, backend=self.backend)
        # As SGLang makes its end of it. Members of another program are no ranks of this one: no public call fits.
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
        """One bucket. Raises RuntimeError when the engine received other bytes."""
        self.group = self.group or self._join(process)
        told = entries(tensors)
        for entry, tensor in zip(told, tensors.values(), strict=True):
            entry["hash"] = hash_of(tensor)
        process.send("receive", entries=told)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # The lockstep recorder knows this program's ranks only.
        with _disable_current_modes():
            for tensor in tensors.values():
                try:
                    self.group.broadcast([tensor.contiguous()], options).wait()
                except RuntimeError as error:
                    process.raise_if_dead(error)
                    raise
        process.answer()

    def done(self) -> None:
        """The group stays for the next push."""


class Process:
    """The server process, as its rank sees it. A thread reads all it says; another waits with it for its end."""

    def __init__(self, python: Path, config: dict, timeout: float):
        self.timeout = timeout
        self.lines: queue.Queue[dict | None] = queue.Queue()
        self.done: list[dict] = []
        self.failed: list[str] = []
        """Of requests that ended in an error, what the server said."""
        self.last_words: deque[str] = deque(maxlen=40)
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
            # Sockets that are connected need their names no more; a job that is killed leaves nothing behind.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        for line in cast(IO[bytes], self.child.stdout):
            self.lines.put(json.loads(line))
        self.child.wait()
        self.lines.put(None)
        if not self.closing:
            time.sleep(GRACE_SECONDS)
            # The rank is busy elsewhere, in a collective perhaps that waits for a rank that waits for this engine.
            with named_exit(lambda: "sampling or after it"):
                raise self.death()

    def _listen(self) -> None:
        for raw in cast(IO[bytes], self.child.stderr):
            for line in lines_of(raw.decode(errors="replace")):
                self.last_words.append(line)
                log.info("sglang: %s", line)

    def death(self) -> EngineDiedError:
        """What is known of the end of the process, in one line."""
        code = self.child.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        time.sleep(0.1)  # its last words may be under way
        words = list(self.last_words)
        said = [line for line in words if re.search(r"Error|crashed", line)] or words
        last = f"; its last words, all of which are in the rank's log file: {said[-1][:300]}" if said else ""
        return EngineDiedError(f"the SGLang engine (process {self.child.pid}) {how}{last}")

    def raise_if_dead(self, cause: Exception) -> None:
        """EngineDiedError if the process ends within a moment of an error that its end explains."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(GRACE_SECONDS / 2)
            raise self.death() from cause

    def send(self, do: str, **what: Any) -> None:
        """A command, without waiting."""
        pipe = cast(IO[bytes], self.child.stdin)
        try:
            pipe.write((json.dumps({"do": do, **what}) + "\n").encode())
            pipe.flush()
        except OSError:
            raise self.death() from None

    def take(self, seconds: float) -> dict | None:
        """The next line that is of no request, or None: the others go into `done` and `failed`.

        Waits only for a first line.
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
            self.lines.put(None)  # whoever asks again is told the same
            raise self.death()
        return None

    def answer(self) -> Any:
        """Wait for the answer to a command.

        Raises:
            RuntimeError: what went wrong in the server, as it says it.
            TimeoutError: no answer within the time that a collective may take.
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
        """A command and its answer."""
        self.send(do, **what)
        return self.answer()

    def close(self) -> None:
        """End it."""
        self.closing = True
        with suppress(OSError):
            cast(IO[bytes], self.child.stdin).close()
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def lines_of(text: str) -> list[str]:
    """The lines of what a process wrote on its console, without progress bars and what they were drawn over."""
    lines = (line.rstrip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not PROGRESS.search(line)]


def environment(config: dict) -> dict[str, str]:
    """What the server process starts with: nothing of torchrun's, which it would join. A user's own values stay."""
    values = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if config["options"]["device"] == "cpu":
        # Cores belong to no engine: they are shared with the ranks. Compiling small helpers costs more than it saves.
        cores = "|".join(["0"] * config["options"]["tp_size"])
        values |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores, "TORCH_COMPILE_DISABLE": "1"}
    return values | {k: v for k, v in os.environ.items() if not RANK_VARIABLES.fullmatch(k)}
