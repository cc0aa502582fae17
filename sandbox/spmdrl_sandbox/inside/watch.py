"""The watcher of a program.

It forwards the program's input and output, and kills the program at its memory, time or output limit. The module needs
only the standard library, as it runs inside the sandbox.
"""

import base64
import contextlib
import json
import os
import select
import signal
import time

from spmdrl_sandbox.inside.talk import Talk

LOOK_SECONDS = 0.02
"""Seconds between two checks of a program's memory."""
UNSENT = 1 << 16
"""Maximum bytes of a session's output that are buffered for the caller; a program that prints more is blocked."""
PROC = "/proc"
COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"HugetlbPages:", b"VmPTE:")
"""Lines of /proc/PID/status whose values are added up (https://docs.kernel.org/filesystems/proc.html): private memory,
shared memory and tmpfs files, swap, huge pages, page tables. Shared memory counts for each process that maps it.
"""


class Watch:
    """Forwards a program's input and output, and kills the program at a limit."""

    def __init__(
        self, child: int, reports: int, inputs: int, outputs: int, errors: int, task: dict, apart: bool, talk: Talk
    ):
        """Start to watch.

        child: id of the program's first process. reports: pipe with the reports of `processes.py`. inputs, outputs,
        errors: the watcher's ends of the program's pipes. task: the program's task. apart: as in `processes.start`.
        talk: connection to the caller.
        """
        self.apart, self.child, self.reports, self.inputs, self.talk = apart, child, reports, inputs, talk
        self.limits, self.session = task["limits"], "session" in task
        self.kept = {outputs: bytearray(), errors: bytearray()}
        self.names = {outputs: "stdout", errors: "stderr"}
        self.open = {reports, outputs, errors}
        self.to_send = bytearray(base64.b64decode(task.get("stdin", "")))
        self.unread = bytearray()
        self.ends = time.monotonic() + self.limits["seconds"]
        self.look = time.monotonic() + LOOK_SECONDS
        self.why = ""
        self.result: dict = {}
        self.written = 0
        os.set_blocking(inputs, False)
        self.own = memory_of("self")

    def to_the_end(self) -> dict:
        """Watch until all processes of the program have ended; return the message with its outcome."""
        while self.open:
            self._turn()
        self.reap()
        self._close_input()
        kept = {self.names[end]: base64.b64encode(data).decode() for end, data in self.kept.items()}
        failure = self.result.get("failure", "")
        if not self.result.keys() & {"code", "failure"} and not self.why:
            failure = "the program's first process ended without a report"
        why = self.why or ("failure" if failure else "")
        numbers = {"code": self.result.get("code", 0), "signal": self.result.get("signal", 0)}
        return numbers | kept | {"why": why, "detail": failure}

    def _turn(self) -> None:
        if not self.to_send and not self.session:
            self._close_input()
        if self.session and b"\n" in self.talk.buffer:
            # A message arrived together with the task and is already in the buffer.
            self._receive()
        full = len(self.talk.unsent) > UNSENT and not self.why
        reading = [end for end in self.open if not (full and self.names.get(end) == "stdout")]
        reading += [self.talk.stdin] if self.session and not self.why else []
        writing = [self.inputs] if self.inputs >= 0 and self.to_send else []
        writing += [self.talk.stdout] if self.talk.unsent else []
        wait = max(0.0, min(self.ends, self.look) - time.monotonic())
        readable, writable, _ = select.select(reading, writing, [], wait)
        if self.talk.stdout in writable:
            self.talk.flush()
        if self.inputs in writable:
            self._feed()
        for end in readable:
            if end == self.talk.stdin:
                self._receive()
            else:
                self._read(end)
        if time.monotonic() >= self.look:
            self.look = time.monotonic() + LOOK_SECONDS
            if not self.why and (passed := self.passed()):
                self.end(passed)
        if time.monotonic() >= self.ends:
            self.end("timeout")

    def end(self, why: str) -> None:
        """Kill all processes of the program and record the reason."""
        self.why = self.why or why
        self.ends = time.monotonic() + 1.0
        self.kill()

    def passed(self) -> str:
        """Return the name of the limit that the program's processes together exceed, or an empty text."""
        # Without a process namespace, /proc also shows other programs' processes, so memory is not checked.
        return "memory" if self.apart and memory_of_others(self.own) > self.limits["memory_mib"] << 20 else ""

    def reap(self) -> None:
        """Wait for the program's first process, after all pipes are closed."""
        os.waitpid(self.child, 0)

    def kill(self) -> None:
        """Kill all processes of the program."""
        # If the child is the first process of a namespace, the kernel then kills all other processes in it.
        for kill, pid in (
            (os.kill, self.child),
            (os.killpg, self.result.get("group")),
        ):
            if pid:
                # The process may already have ended.
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _read(self, end: int) -> None:
        data = os.read(end, 1 << 16)
        if not data:
            os.close(end)
            self.open.discard(end)
        elif end == self.reports:
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                self.result |= json.loads(line)
        else:
            self.written += len(data)
            if self.session and self.names[end] == "stdout":
                if not self.why:
                    self.talk.send({"output": base64.b64encode(data).decode()}, wait=False)
            else:
                room = (self.limits["output_kib"] << 10) - len(self.kept[end])
                self.kept[end] += data[: max(0, room)]
            if self.written > self.limits["output_kib"] << 10:
                self.end("output")

    def _feed(self) -> None:
        try:
            del self.to_send[: os.write(self.inputs, self.to_send)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.to_send.clear()
            self._close_input()

    def _receive(self) -> None:
        while not self.why:
            message = self.talk.receive()
            if message is None or "input" not in message:
                self.end("closed")
            else:
                self.to_send += base64.b64decode(message["input"])
            if b"\n" not in self.talk.buffer:
                break

    def _close_input(self) -> None:
        if self.inputs >= 0:
            os.close(self.inputs)
            self.inputs = -1


def memory_of(pid: str) -> int:
    """Return how many bytes of memory and swap a process uses, without the page cache, or 0 if it has ended."""
    try:
        with open(f"{PROC}/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(COUNTED))


def memory_of_others(own: int) -> int:
    """Return how many bytes of memory a program's processes use.

    The program's processes are all processes in /proc except process 1, the zygote and the watcher. own: memory of this
    process in bytes. This amount is subtracted for each process, because forked processes share that memory.
    """
    sandbox = {"1", str(os.getppid()), str(os.getpid())}
    return sum(max(0, memory_of(pid) - own) for pid in os.listdir(PROC) if pid.isdigit() and pid not in sandbox)
