"""Runs rows of the table of attacks in sandboxes, several at a time, and tells what was not kept in."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from spmdrl_sandbox.base import Limits, Outcome, Program
from spmdrl_sandbox.warm import Warm
from tests.sandbox.attacks import ENDS, Attack
from tests.sandbox.opened import below, open_or_skip, settled

LIMITS = Limits(seconds=15.0, cpu_seconds=15, memory_mib=128, tmp_mib=16, output_kib=64)
"""Of attacks that end by themselves or at another limit, on a machine that has much else to do."""
SHORT = 0.5
"""Seconds of attacks that end when their time is up."""
SLACK = 3.0
"""Seconds that the end of a program may take beyond its limit."""
FOLDER = {"bubblewrap": "/tmp", "sandlock": ".", "none": "."}
"""Where programs may write. Below sandlock /tmp is that of the machine, and a program sees nothing of it."""
AT_A_TIME = 4


@contextlib.contextmanager
def caller_in(folder: Path) -> Iterator[dict]:
    """Gives what a caller has and programs are after, as words of the table's programs."""
    secret = folder / "secret"
    secret.write_text("secret")
    unix, abstract = str(folder / "socket"), f"spmdrl-{os.getpid()}-{folder.name}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        by_path.bind(unix)
        by_name.bind("\0" + abstract)
        for each in (server, by_path, by_name):
            each.listen(64)
        words = {"file": str(secret), "folder": str(folder), "port": server.getsockname()[1], "pid": os.getpid()}
        yield words | {"unix": unix, "abstract": abstract}


def ends_of(attack: Attack, provider: str) -> str:
    """How an attack must end in a sandbox."""
    return ENDS.get(provider, {}).get(attack.name, attack.ends)


def limits_of(attack: Attack, provider: str) -> Limits:
    """The limits of an attack."""
    if ends_of(attack, provider) == "timeout":
        return replace(LIMITS, seconds=SHORT)
    return LIMITS


def start(attack: Attack, provider: str, warm: Warm, caller: dict) -> Outcome:
    """Runs an attack."""
    return warm.run(Program(attack.source.format(**caller, tmp=FOLDER[provider])), limits_of(attack, provider))


def wrong_end(attack: Attack, provider: str, ended: Outcome) -> str:
    """What is wrong with the end of an attack that must be kept in; nothing if it was."""
    ends = ends_of(attack, provider)
    if "BREACH" in ended.stdout or ended.verdict == "failure":
        return f"{ended}"
    if ends == "kept" and not (ended.verdict == "ok" and "kept" in ended.stdout):
        return f"it did not end by itself, kept in: {ended}"
    if ends not in ("kept", "ended") and ended.verdict != ends:
        return f"it did not end by {ends}: {ended}"
    late = ended.seconds - limits_of(attack, provider).seconds
    return f"it ended {late:.1f} s late: {ended}" if late > SLACK else ""


def steady(look: Callable[[], Any]) -> Any:
    """What several looks in a row find, once they find the same."""
    seen: list[Any] = []

    def same() -> bool:
        seen.append(look())
        return len(seen) > 3 and bool(seen[-1]) and len(set(seen[-4:])) == 1

    assert settled(same), seen
    return seen[-1]


def idle_of(warm: Warm) -> int:
    """Processes below a sandbox in which nothing runs."""
    return steady(lambda: len(below(warm.process.pid)))


def wrong_after(provider: str, warm: Warm, idle: int, patience: float = 30.0) -> str:
    """What an attack has left for the next program: it is as well off as the first, and no process is left."""
    again = warm.run(Program(f"import os; print(os.listdir('{FOLDER[provider]}'), os.getcwd())"), LIMITS)
    if not again.stdout.startswith("[] /tmp"):
        return f"the next program finds {again}"
    if not settled(lambda: len(below(warm.process.pid)) == idle, patience):
        return f"{below(warm.process.pid)} are left, where there were {idle} processes"
    return ""


@dataclass(frozen=True)
class Traces:
    """What a process has that programs of its sandboxes could leave behind, to be compared before and after."""

    processes: frozenset[int]
    """Below this one, those included that it has adopted (`adopt`)."""
    open_files: dict[str, str]
    """Its descriptors, and what they are."""
    files: dict[str, tuple]
    """Below folders, with mode, owner, links, size and times."""

    @classmethod
    def of(cls, *folders: Path) -> "Traces":
        """Looks at this process, and at folders."""
        for child in psutil.Process().children():
            # One that was adopted and has ended waits for this process.
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
        here = Path("/proc/self/fd")
        held = {}
        for number in os.listdir(here):
            # The listing's own is gone.
            with contextlib.suppress(FileNotFoundError):
                held[number] = os.readlink(here / number)
        files = {}
        for place in (found for folder in folders for found in (folder, *folder.rglob("*"))):
            said = place.lstat()
            files[str(place)] = (said.st_mode, said.st_uid, said.st_nlink, said.st_size, said.st_mtime_ns)
        return cls(frozenset(each.pid for each in psutil.Process().children(recursive=True)), held, files)

    def differences(self, after: "Traces") -> list[str]:
        """A line for each kind of trace that is not as it was."""
        lines = []
        for name in (field.name for field in fields(self)):
            old, new = getattr(self, name), getattr(after, name)
            if old != new:
                changed = {each for each in {*old, *new} if not isinstance(old, dict) or old.get(each) != new.get(each)}
                lines.append(f"{name} are not as before: {sorted(changed)[:10]}")
        return lines


def adopt() -> None:
    """Makes this process the one whose children orphans below it become."""
    set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0) == 0


def inside(warm: Warm) -> tuple[int, ...]:
    """What a sandbox itself holds while it is idle: its processes' open files, and files of its folder."""
    counts = []
    for pid in (warm.process.pid, *sorted(below(warm.process.pid))):
        # Another user's are closed to a caller that is not root.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            counts.append(len(os.listdir(f"/proc/{pid}/fd")))
    folder = folder_of(warm)
    return (*counts, len(list(folder.iterdir())) if folder else 0)


def folder_of(warm: Warm) -> Path | None:
    """The folder of sandlock's supervisor, which holds those of its programs; None of other sandboxes."""
    for pid in below(warm.process.pid):
        with contextlib.suppress(OSError):
            place = Path(os.readlink(f"/proc/{pid}/cwd"))
            if place.name.startswith("program-"):
                return place.parent
    return None


def kept_in(attacks: Iterable[Attack], provider: str, caller: dict, at_a_time: int = AT_A_TIME) -> list[str]:
    """Runs attacks, each sandbox taking the next when it is free. Returns a line for each that was not kept in."""
    waiting: SimpleQueue[Attack] = SimpleQueue()
    for attack in attacks:
        waiting.put(attack)

    def one_sandbox() -> list[str]:
        # A sandbox ends with the thread that opened it.
        warm, wrong = open_or_skip(provider), []
        try:
            idle = idle_of(warm)
            held, folder = steady(lambda: inside(warm)), folder_of(warm)
            with contextlib.suppress(Empty):
                while True:
                    attack = waiting.get_nowait()
                    found = wrong_end(attack, provider, start(attack, provider, warm, caller))
                    found = found or wrong_after(provider, warm, idle)
                    wrong += [f"{attack.name}: {found}"] if found else []
            if not settled(lambda: inside(warm) == held):
                wrong.append(f"the sandbox holds {inside(warm)} files, where it held {held}")
        finally:
            warm.close()
        if folder and folder.exists():
            wrong.append(f"{folder} is left of a sandbox")
        return wrong

    with ThreadPoolExecutor(at_a_time) as threads:
        running = [threads.submit(one_sandbox) for _ in range(at_a_time)]
        return [line for each in running for line in each.result()]
