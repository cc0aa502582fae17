"""Runs hostile programs one after another, each in namespaces of its own: the first process of a sandbox.

`python -P -s -B zygote.py apart|plain USER` inside the sandbox reads one JSON object a line from stdin. `plain` makes no
namespaces and drops no rights: something else keeps the program in, or nothing does.

    {"source": text} or {"argv": [words]}    Python, run in a copy of this process, or another program; with "stdin",
                                             "files" {name: text}, "limits" (fields of `Limits`), and "session" {}

and answers with one on stdout:

    {"code": n, "signal": n, "seconds": s, "stdout": base64, "stderr": base64, "why": word, "detail": text}

`why` is "" for a program that ended by itself, else the limit that ended it (`timeout`, `memory`, `output`), `closed`,
or `failure` where the sandbox itself could not run it. While a session runs, lines {"input": base64} go to the
program's stdin, {"close": true} ends it, and its output comes at once as {"output": base64}. Standard library only.
"""

import base64
import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# What short programs import, so that a copy of this process has it already.
import atexit  # noqa: E402
import bisect  # noqa: E402, F401
import collections  # noqa: E402, F401
import copy  # noqa: E402, F401
import datetime  # noqa: E402, F401
import decimal  # noqa: E402, F401
import fractions  # noqa: E402, F401
import functools  # noqa: E402, F401
import heapq  # noqa: E402, F401
import itertools  # noqa: E402, F401
import math  # noqa: E402, F401
import random  # noqa: E402, F401
import re  # noqa: E402, F401
import statistics  # noqa: E402, F401
import string  # noqa: E402, F401
import threading  # noqa: E402
import typing  # noqa: E402, F401

import isolate  # noqa: E402
import values  # noqa: E402, F401

LOOK_SECONDS = 0.02
"""Time between two looks at the memory of a program's processes."""
PAGE = os.sysconf("SC_PAGE_SIZE")
APART = sys.argv[1:2] == ["apart"]


def run(task: dict, talk: "Talk") -> dict:
    """Run one program and return how it ended."""
    begin = time.monotonic()
    told, tell = os.pipe()
    inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            isolate.die_with_parent()
            (_above if APART else _first)(task, tell, (inputs[0], outputs[1], errors[1]))
        except BaseException:
            _say(tell, {"failure": traceback.format_exc()})
        os._exit(0)
    for end in (tell, inputs[0], outputs[1], errors[1]):
        os.close(end)
    watch = Watch(child, told, inputs[1], outputs[0], errors[0], task, talk)
    out = watch.to_the_end()
    out["seconds"] = time.monotonic() - begin
    return out


# ── the three processes of a program ─────────────────────────────────────────


def _above(task: dict, tell: int, pipes: tuple[int, int, int]) -> None:
    """Make the namespaces, and wait for the process that is the first one in them."""
    isolate.own_namespaces(task["limits"]["tmp_mib"] << 20)
    first = os.fork()
    if first == 0:
        try:
            isolate.die_with_parent()
            _first(task, tell, pipes)
        except BaseException:
            _say(tell, {"failure": traceback.format_exc()})
        os._exit(0)
    _say(tell, {"first": first})
    os.waitpid(first, 0)


def _first(task: dict, tell: int, pipes: tuple[int, int, int]) -> None:
    """Be process 1 of the namespace: when it ends, the kernel kills all others in it."""
    if APART:
        isolate.own_proc()
        isolate.hide()
    program = os.fork()
    if program == 0:
        try:
            _prepare(task, pipes)
        except BaseException:
            _say(tell, {"failure": traceback.format_exc()})
            os._exit(0)
        os.closerange(3, 1024)
        _program(task)
    for end in pipes:
        os.close(end)
    if not APART:
        _say(tell, {"group": program})
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            _say(tell, {"code": max(code, 0), "signal": max(-code, 0)})
            return


def _prepare(task: dict, pipes: tuple[int, int, int]) -> None:
    os.setsid()
    folder = "/tmp" if APART else os.getcwd()
    os.chdir(folder)
    for name, text in task.get("files", {}).items():
        place = os.path.join(folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)
    for number, end in enumerate(pipes):
        os.dup2(end, number)
    isolate.limit(task["limits"])
    if APART:
        isolate.drop_rights()


def _program(task: dict) -> None:
    """Become the program; does not return."""
    if "argv" in task:
        try:
            os.execvp(task["argv"][0], task["argv"])
        except OSError as error:
            os.write(2, f"{task['argv'][0]}: {error}\n".encode())
            os._exit(127)
    code = 1
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    sys.path[0] = os.getcwd()
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(task["source"], "program.py", "exec"), module.__dict__)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        # The frames above belong to this file.
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 255)


def _say(tell: int, message: dict) -> None:
    os.write(tell, (json.dumps(message) + "\n").encode())


# ── the process that watches ─────────────────────────────────────────────────


class Watch:
    """Carries a program's input and output, and ends it at a limit."""

    def __init__(self, child: int, told: int, inputs: int, outputs: int, errors: int, task: dict, talk: "Talk"):
        """told: pipe on which the processes of the program say how it goes. The others are its own pipes."""
        self.child, self.told, self.inputs, self.talk = child, told, inputs, talk
        self.limits, self.session = task["limits"], "session" in task
        self.kept = {outputs: bytearray(), errors: bytearray()}
        self.names = {outputs: "stdout", errors: "stderr"}
        self.open = {told, outputs, errors}
        self.to_send = bytearray(base64.b64decode(task.get("stdin", "")))
        self.said = bytearray()
        self.ends = time.monotonic() + self.limits["seconds"]
        self.look = time.monotonic() + LOOK_SECONDS
        self.why = ""
        self.result: dict = {}
        self.written = 0
        os.set_blocking(inputs, False)
        self.own = anonymous("self")

    def to_the_end(self) -> dict:
        """Watch until the program and all of its processes have ended."""
        while self.open:
            self._turn()
        os.waitpid(self.child, 0)
        self._close_input()
        kept = {self.names[end]: base64.b64encode(data).decode() for end, data in self.kept.items()}
        failure = self.result.get("failure", "")
        if not self.result.keys() & {"code", "failure"} and not self.why:
            failure = "the program's first process ended without a word"
        why = self.why or ("failure" if failure else "")
        numbers = {"code": self.result.get("code", 0), "signal": self.result.get("signal", 0)}
        return numbers | kept | {"why": why, "detail": failure}

    def _turn(self) -> None:
        if not self.to_send and not self.session:
            self._close_input()
        if self.session and b"\n" in self.talk.buffer:
            # It came with the task.
            self._hear()
        reading = [*self.open, *([self.talk.stdin] if self.session and not self.why else [])]
        writing = [self.inputs] if self.inputs >= 0 and self.to_send else []
        wait = max(0.0, min(self.ends, self.look) - time.monotonic())
        readable, writable, _ = select.select(reading, writing, [], wait)
        if writable:
            self._feed()
        for end in readable:
            if end == self.talk.stdin:
                self._hear()
            else:
                self._read(end)
        if time.monotonic() >= self.look:
            self.look = time.monotonic() + LOOK_SECONDS
            # Without a process namespace the others are not this program's.
            if APART and not self.why and memory_of_others(self.own) > self.limits["memory_mib"] << 20:
                self.end("memory")
        if time.monotonic() >= self.ends:
            self.end("timeout")

    def end(self, why: str) -> None:
        """Kill the program with all of its processes."""
        self.why = self.why or why
        self.ends = time.monotonic() + 1.0
        # The kernel kills a process namespace with its first process, and that one with its parent.
        for pid in (self.result.get("first"), self.child):
            if pid:
                os.kill(pid, signal.SIGKILL)
        if group := self.result.get("group"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _read(self, end: int) -> None:
        data = os.read(end, 1 << 16)
        if not data:
            os.close(end)
            self.open.discard(end)
        elif end == self.told:
            *lines, self.said = (self.said + data).split(b"\n")
            for line in lines:
                self.result |= json.loads(line)
        else:
            self.written += len(data)
            if self.session and self.names[end] == "stdout":
                self.talk.say({"output": base64.b64encode(data).decode()})
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

    def _hear(self) -> None:
        while not self.why:
            message = self.talk.hear()
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


def anonymous(pid: str) -> int:
    """Return the bytes of a process that no file backs, 0 of one that has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


def memory_of_others(own: int) -> int:
    """Return the bytes of all processes here but this one and the first. own: what copies of this one begin with."""
    mine = {"1", str(os.getpid())}
    return sum(max(0, anonymous(pid) - own) for pid in os.listdir("/proc") if pid.isdigit() and pid not in mine)


class Talk:
    """Lines of JSON with the caller."""

    def __init__(self):
        # Programs get pipes of their own; what a library prints here must not stand between the lines.
        self.stdin, self.stdout = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        self.buffer = bytearray()

    def hear(self) -> dict | None:
        """Return the next line, or None at the end."""
        while b"\n" not in self.buffer:
            data = os.read(self.stdin, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def say(self, message: dict) -> None:
        """Send a line."""
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self.stdout, data) :]


def main() -> None:
    """Serve until stdin ends."""
    isolate.become(int(sys.argv[2]))
    talk = Talk()
    talk.say({"ready": True})
    while (task := talk.hear()) is not None:
        if "limits" not in task:
            # Words to a session that has just ended.
            continue
        try:
            answer = run(task, talk)
        except Exception:
            answer = {"why": "failure", "detail": traceback.format_exc()}
        talk.say(answer)


if __name__ == "__main__":
    main()
