"""Runs programs one after another, each in a sandbox of sandlock's (https://github.com/multikernel/sandlock).

`python -m spmdrl_sandbox.supervisor` exchanges the zygote's messages (inside/zygote.py) on stdin and stdout, and stays
outside: from here sandlock answers system calls of programs, and limits are watched. Each program gets a sandbox with a
folder of its own, since Landlock does not keep two programs of one sandbox apart; the next sandbox starts ahead. No
namespace ends with its first process, so this process adopts processes that programs leave behind, and ends them.
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
"""Processes in the first program's sandbox, which is started before its limits are known."""
DEEPEST = 64
"""Most folders within each other."""
FILES = 4096
"""Most files and folders of a program: as many as bubblewrap's /tmp holds."""


class Held:
    """A process in a sandbox of its own that waits for the program to become."""

    def __init__(self, base: Path, processes: int):
        """base: a folder of the supervisor. processes: how many there may be in the sandbox."""
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
            # No other of this user may have the name.
            name=f"sandbox-{secrets.token_hex(8)}",
        )
        words = [python(), *BARE, "-m", "spmdrl_sandbox.inside.alone", str(runs_as)]
        self.process = sandbox.popen(words, StdioMode.PIPED, StdioMode.PIPED, StdioMode.PIPED)
        self.pid = cast(int, self.process.pid)
        self.ends: list[int] = []
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            file = cast(IO[bytes], pipe)
            # A file would close its number once more after the watcher has.
            self.ends.append(os.dup(file.fileno()))
            file.close()

    def become(self, task: dict) -> str:
        """Have it become a program; returns why it could not, or nothing."""
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
        """End it with what it started, and remove its folder."""
        kill(self.pid)
        with contextlib.suppress(RuntimeError):
            # Its watcher may be waiting for it already.
            self.process.wait()
        sweep()
        for end in self.ends:
            os.close(end)
        leftovers.remove(str(self.folder))


class Outside(Watch):
    """Watches a program from outside of its sandbox."""

    def __init__(self, held: Held, task: dict, talk: Talk):
        """held: has become the program."""
        reports, self.report = os.pipe()
        # This object closes them.
        (inputs, outputs, errors), held.ends = held.ends, []
        super().__init__(held.pid, reports, inputs, outputs, errors, task, False, talk)
        self.held, self.own = held, memory_of(str(held.pid))
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    def _wait(self) -> None:
        ended = self.held.process.wait()
        # The program's other processes end with it; they may hold the pipes open.
        sweep()
        number = max(ended.signal, 0) if ended.reason == ExitReason.SIGNALED else signal.SIGKILL
        exited = ended.reason == ExitReason.EXITED
        result = {"code": ended.exit_code if exited else 0, "signal": 0 if exited else number}
        os.write(self.report, (json.dumps(result) + "\n").encode())
        os.close(self.report)

    def passed(self) -> str:
        """Return `memory` if the program's processes hold too much, or its files do."""
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
    """Kill a process, which may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """Return the processes below a process."""
    found: set[int] = set()
    more = [pid]
    while more:
        folder = f"/proc/{more.pop()}/task"
        with contextlib.suppress(OSError):
            for thread in os.listdir(folder):
                # A thread may end at this moment.
                with contextlib.suppress(OSError), open(f"{folder}/{thread}/children") as file:
                    children = {int(word) for word in file.read().split()} - found
                found |= children
                more += children
    return found


def sweep() -> None:
    """End all processes below this one, those that programs left behind included."""
    while left := descendants(os.getpid()):
        for pid in left:
            kill(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def fits(folder: str, most: int) -> bool:
    """Tell whether the files below a folder are few and small enough together. most: bytes."""
    count = total = 0
    more = [(folder, 0)]
    while more:
        place, depth = more.pop()
        try:
            with os.scandir(place) as entries:
                inside = list(entries)
        except FileNotFoundError:
            # It was removed at this moment.
            continue
        except OSError:
            # Its name is too long, or it cannot be read: nobody could count what is in it.
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
    """Answer tasks until stdin ends."""
    cache()
    shutil.copytree(HERE, base / "code" / "spmdrl_sandbox")
    held = Held(base, PROCESSES)
    try:
        talk.send({"ready": True})
        while (task := talk.receive()) is not None:
            if "limits" not in task:
                # A message to a session that has just ended.
                continue
            processes = task["limits"]["processes"]
            if held.processes != processes:
                held.end()
                held = Held(base, processes)
            talk.send(run(held, task, talk))
            held.end()
            held = Held(base, processes)
    finally:
        # The end of stdin and the signal may both come: the second must not interrupt the first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        held.end()


def run(held: Held, task: dict, talk: Talk) -> dict:
    """Run one program and return how it ended."""
    begin = time.monotonic()
    try:
        failure = held.become(task)
        out = {"why": "failure", "detail": failure} if failure else Outside(held, task, talk).to_the_end()
    except Exception:
        out = {"why": "failure", "detail": traceback.format_exc()}
    return out | {"seconds": time.monotonic() - begin}


def main() -> None:
    """Serve; SIGTERM and the caller's end are the end of all programs."""
    prctl = ctypes.CDLL(None).prctl
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="sandlock-") as base:
        os.chmod(base, 0o711)
        serve(Path(base), Talk())


if __name__ == "__main__":
    main()
