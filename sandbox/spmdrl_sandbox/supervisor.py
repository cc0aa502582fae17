"""Runs programs one after another, each in its own sandlock sandbox (https://github.com/multikernel/sandlock).

`python -m spmdrl_sandbox.supervisor` exchanges the same messages as the zygote (inside/zygote.py) on stdin and stdout.
The supervisor runs outside the sandboxes. In this process, sandlock handles the programs' system calls, and a watcher
checks whether programs stay within their limits. Each program has a sandbox with a separate folder, since Landlock does
not isolate two programs in the same sandbox. The next sandbox is started ahead of time. Without process namespaces, the
end of a program does not kill all of its processes. Therefore, this process adopts the processes that programs leave
behind, and kills them.
"""

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO, cast

from sandlock import ExitReason, Sandbox, StdioMode

from spmdrl_sandbox.inside import leftovers
from spmdrl_sandbox.inside.alone import STARTED
from spmdrl_sandbox.inside.talk import Talk
from spmdrl_sandbox.inside.watch import Watch, memory_of
from spmdrl_sandbox.places import BARE, ENVIRONMENT, HERE, cache, packages, python, system
from spmdrl_sandbox.sandlock import user

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
READABLE = ("/dev/full", "/dev/random", "/dev/urandom")
WRITABLE = ("/dev/null",)
START_SECONDS = 20.0
PROCESSES = 16
"""Process limit of the first sandbox, which is started before the limits of its program are known."""
DEEPEST = 64
"""Maximum depth of a program's nested folders."""
FILES = 4096
"""Maximum number of files and folders that a program may have, the same as in bubblewrap's /tmp."""


class Held:
    """A process in its own sandbox that waits for a task and then becomes the program that the task describes."""

    def __init__(self, base: Path, processes: int):
        """Start the process. base: temporary folder of the supervisor. processes: process limit of the sandbox."""
        self.processes, runs_as = processes, user()
        self.folder = Path(tempfile.mkdtemp(prefix="program-", dir=base))
        if runs_as:
            os.chown(self.folder, runs_as, runs_as)
        code, folder = str(base / "code"), str(self.folder)
        sandbox = Sandbox(
            fs_readable=[*system(), code, packages(), *READABLE],
            fs_writable=[folder, *WRITABLE],
            cwd=folder,
            clean_env=True,
            env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": f"{code}:{packages()}"},
            max_processes=processes,
            # The name must be unique among the sandboxes of this user.
            name=f"sandbox-{secrets.token_hex(8)}",
        )
        words = [python(), *BARE, "-m", "spmdrl_sandbox.inside.alone", str(runs_as)]
        self.process = sandbox.popen(words, StdioMode.PIPED, StdioMode.PIPED, StdioMode.PIPED)
        self.pid = cast(int, self.process.pid)
        self.ends: list[int] = []
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            file = cast(IO[bytes], pipe)
            # Duplicate the descriptor. Otherwise the watcher and the file object would close the same descriptor.
            self.ends.append(os.dup(file.fileno()))
            file.close()

    def become(self, task: dict) -> str:
        """Turn the process into a program. Return an empty text, or the reason if this failed."""
        inputs, outputs, errors = self.ends
        words = json.dumps({name: part for name, part in task.items() if name not in ("stdin", "session")}).encode()
        data = len(words).to_bytes(8, "little") + words
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(inputs, data) :]
        if not select.select([outputs], [], [], START_SECONDS)[0]:
            return f"it did not start within {START_SECONDS:g} s"
        if os.read(outputs, 1) == STARTED:
            return ""
        text = os.read(errors, 1 << 16).decode(errors="replace") if select.select([errors], [], [], 1.0)[0] else ""
        return text or "it ended before it became the program"

    def end(self) -> None:
        """Kill the process and its descendants, and remove its folder."""
        kill(self.pid)
        with contextlib.suppress(RuntimeError):
            # The watcher's thread may already be waiting for this process.
            self.process.wait()
        sweep()
        for end in self.ends:
            os.close(end)
        leftovers.remove(str(self.folder))


class Outside(Watch):
    """A watcher that runs outside of its program's sandbox."""

    def __init__(self, held: Held, task: dict, talk: Talk):
        """Start to watch a program. held: the process that became the program. task: the program's task."""
        reports, self.report = os.pipe()
        # This object takes over the pipes and will close them.
        (inputs, outputs, errors), held.ends = held.ends, []
        super().__init__(held.pid, reports, inputs, outputs, errors, task, False, talk)
        self.held, self.own = held, memory_of(str(held.pid))
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    def _wait(self) -> None:
        ended = self.held.process.wait()
        # Kill the program's other processes, which may keep the pipes open.
        sweep()
        number = max(ended.signal, 0) if ended.reason == ExitReason.SIGNALED else signal.SIGKILL
        exited = ended.reason == ExitReason.EXITED
        result = {"code": ended.exit_code if exited else 0, "signal": 0 if exited else number}
        os.write(self.report, (json.dumps(result) + "\n").encode())
        os.close(self.report)

    def passed(self) -> str:
        """Return `memory` if the program's processes or files are too large, otherwise an empty text."""
        held = sum(max(0, memory_of(str(pid)) - self.own) for pid in descendants(os.getpid()))
        full = not fits(str(self.held.folder), self.limits["tmp_mib"] << 20)
        return "memory" if full or held > self.limits["memory_mib"] << 20 else ""

    def reap(self) -> None:
        """Wait until all of the program's processes have ended."""
        self.waiter.join()

    def kill(self) -> None:
        """Kill all of the program's processes."""
        for pid in descendants(os.getpid()):
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process; do nothing if it has already ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """Return the ids of all descendants of the process `pid`."""
    found: set[int] = set()
    more = [pid]
    while more:
        folder = f"/proc/{more.pop()}/task"
        with contextlib.suppress(OSError):
            for thread in os.listdir(folder):
                # A thread may end while its children are listed.
                with contextlib.suppress(OSError), open(f"{folder}/{thread}/children") as file:
                    children = {int(word) for word in file.read().split()} - found
                found |= children
                more += children
    return found


def sweep() -> None:
    """Kill all descendants of this process, including adopted processes that programs left behind."""
    while left := descendants(os.getpid()):
        for pid in left:
            kill(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def fits(folder: str, most: int) -> bool:
    """Return whether a folder has at most `FILES` entries, `DEEPEST` nested levels, and `most` bytes in total."""
    count = total = 0
    more = [(folder, 0)]
    while more:
        place, depth = more.pop()
        try:
            with os.scandir(place) as entries:
                inside = list(entries)
        except FileNotFoundError:
            # The folder was removed while it was being scanned.
            continue
        except OSError:
            # The path is too long, or the folder cannot be read, so that its files cannot be counted.
            return False
        for entry in inside:
            count += 1
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    more.append((entry.path, depth + 1))
            except FileNotFoundError:
                continue
            except OSError:
                return False
            if count > FILES or total > most or depth > DEEPEST:
                return False
    return True


def serve(base: Path, talk: Talk) -> None:
    """Run a program for each task on stdin and send its outcome, until stdin ends."""
    cache()
    shutil.copytree(HERE, base / "code" / "spmdrl_sandbox")
    held = Held(base, PROCESSES)
    try:
        talk.send({"ready": True})
        while (task := talk.receive()) is not None:
            if "limits" not in task:
                # Ignore messages to a session that has just ended.
                continue
            processes = task["limits"]["processes"]
            if held.processes != processes:
                held.end()
                held = Held(base, processes)
            talk.send(run(held, task, talk))
            held.end()
            held = Held(base, processes)
    finally:
        # SIGTERM may arrive after the end of stdin; ignore it, so that it does not interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        held.end()


def run(held: Held, task: dict, talk: Talk) -> dict:
    """Run one program and return the message with its outcome."""
    begin = time.monotonic()
    try:
        failure = held.become(task)
        out = {"why": "failure", "detail": failure} if failure else Outside(held, task, talk).to_the_end()
    except Exception:
        out = {"why": "failure", "detail": traceback.format_exc()}
    return out | {"seconds": time.monotonic() - begin}


def main() -> None:
    """Run tasks until stdin ends, the caller dies or SIGTERM arrives; then kill all programs."""
    prctl = ctypes.CDLL(None).prctl
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="sandlock-") as base:
        os.chmod(base, 0o711)
        serve(Path(base), Talk())


if __name__ == "__main__":
    main()
