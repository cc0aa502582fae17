"""The caller's side of a sandbox that stays open. Its zygote process starts programs and exchanges lines of JSON."""

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict
from typing import IO, Any, cast

from spmdrl_sandbox import cgroup
from spmdrl_sandbox.base import Limits, Outcome, Program, SandboxError, Verdict
from spmdrl_sandbox.inside import leftovers

START_SECONDS = 30.0
"""Maximum seconds that a sandbox may take to start."""
END_SECONDS = 5.0
"""Maximum seconds that a sandbox may take to end before it is killed."""
SEND_SECONDS = 10.0
"""Maximum seconds that a sandbox may take to read a message."""
GRACE = 5.0
"""Seconds that a sandbox has after a program's time limit to report the program's end, before it counts as failed."""


class Warm:
    """A sandbox that runs one program after another. Use it from one thread only.

    The sandbox isolates programs from each other, except with the provider `none`.
    """

    def __init__(self, command: list[str], name: str = "", once: bool = False):
        """Start the sandbox.

        command: words of the command that starts the zygote. name: name of the sandbox for logs. once: True to start a
        new zygote for each program.

        Raises:
            SandboxError: the sandbox does not start.
        """
        self.command, self.name, self.once = command, name or command[0], once
        self.process: Any = None
        self.group: cgroup.Group | None = None
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        """Working folder of programs that do not have a private /tmp."""
        try:
            self._start()
        except SandboxError:
            self.close()
            raise

    def _start(self) -> None:
        self.buffer = bytearray()
        self.used = False
        """True after a program was started in this zygote."""
        self.errors.truncate(0)
        self.group = cgroup.make()
        try:
            self.process = subprocess.Popen(
                self.group.words(self.command) if self.group else self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                cwd=self.folder.name,
                env={},
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{self.command[0]} does not start: {error}") from None
        os.set_blocking(cast(IO[bytes], self.process.stdin).fileno(), False)
        self._answer(time.monotonic() + START_SECONDS)

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Run a program to its end and return its outcome.

        Raises:
            SandboxError: the sandbox itself ended, or does not answer. With `once`, this is an error of the program and
                is returned as its outcome.
        """
        self.send(task_of(program, limits))
        try:
            return outcome_of(self._answer(time.monotonic() + limits.seconds + GRACE))
        except SandboxError as error:
            if not self.once:
                raise
            # The program has ended its zygote, which was only for this program.
            return Outcome("error", why=str(error))

    def close(self) -> None:
        """Stop the sandbox and all of its processes. May be called twice."""
        self._end()
        self.errors.close()
        # Without a sandbox, processes left by a program may still write to the folder.
        with contextlib.suppress(OSError):
            leftovers.empty(self.folder.name)
        self.folder.cleanup()

    def _end(self) -> None:
        if self.process is not None:
            self._end_process()
        if self.group is not None:
            self.group.close()

    def _end_process(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            # Closing fails if the sandbox ended before it read all messages. The unread messages are dropped.
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()
        if self.process.returncode is None:
            # SIGTERM lets a supervisor or a container client end the processes that it started.
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the zygote.

        Raises:
            SandboxError: the sandbox has ended, or does not read messages.
        """
        if "limits" in message:
            if self.once and self.used:
                self._end()
                self._start()
            self.used = True
            if self.group is not None:
                self.group.limit(message["limits"])
        data = memoryview((json.dumps(message) + "\n").encode())
        pipes = [cast(IO[bytes], pipe).fileno() for pipe in (self.process.stdin, self.process.stdout)]
        until = time.monotonic() + SEND_SECONDS
        while data:
            # Read while sending, because the zygote may be blocked in a write and cannot read until the write is done.
            readable, writable, _ = select.select([pipes[1]], [pipes[0]], [], max(0.0, until - time.monotonic()))
            if readable:
                self._read(pipes[1])
            elif not writable:
                raise SandboxError("the sandbox does not read messages")
            if writable:
                with contextlib.suppress(BlockingIOError):
                    try:
                        data = data[os.write(pipes[0], data) :]
                    except BrokenPipeError:
                        raise SandboxError(self._why()) from None

    def _answer(self, until: float) -> dict[str, Any]:
        message = self.receive(until)
        if message is None:
            raise SandboxError("the sandbox did not answer in time")
        return message

    def receive(self, until: float) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives before the time `until` (time.monotonic()).

        Raises:
            SandboxError: the sandbox has ended, or sent an invalid message.
        """
        pipe = cast(IO[bytes], self.process.stdout)
        while b"\n" not in self.buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            self._read(pipe.fileno())
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            # Without namespaces, a program could have written to the zygote's pipe.
            raise SandboxError("the sandbox sent an invalid message")
        return message

    def _read(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        if not data:
            raise SandboxError(self._why())
        self.buffer += data

    def _why(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        # Select lines without indentation, such as the last line of a traceback or a container client's message.
        last = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))][-2:]
        return f"the sandbox ended with exit code {self.process.returncode}: {'; '.join(last) or 'it printed nothing'}"


def task_of(program: Program, limits: Limits) -> dict[str, Any]:
    """Return the message that asks the zygote to run a program."""
    what: dict[str, Any] = {"argv": list(program.argv)} if program.argv else {"source": program.source}
    stdin = base64.b64encode(program.stdin.encode(errors="surrogatepass")).decode()
    return what | {"stdin": stdin, "files": program.files, "limits": asdict(limits)}


def outcome_of(message: dict[str, Any]) -> Outcome:
    """Return the outcome of a program from a message of the zygote."""
    stdout, stderr = (
        base64.b64decode(message.get(name, "")).decode("utf-8", errors="replace") for name in ("stdout", "stderr")
    )
    code, number, why = message.get("code", 0), message.get("signal", 0), message["why"]
    if why == "closed":
        return Outcome("ok", stderr=stderr)
    verdict: Verdict = why if why else ("ok" if code == 0 and number == 0 else "error")
    last = (stderr.strip().splitlines() or [""])[-1]
    if verdict == "error" and last.startswith("MemoryError"):
        verdict = "memory"
    if verdict == "error" and number == signal.SIGXCPU:
        verdict = "timeout"
    reasons = {
        "ok": "",
        "error": last or (f"signal {number}" if number else f"exit code {code}"),
        "failure": message.get("detail", ""),
    }
    return Outcome(verdict, code, number, stdout, stderr, message.get("seconds", 0.0), reasons.get(verdict, verdict))
