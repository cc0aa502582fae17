"""Types of the sandbox: a program, its limits, and how it ended."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "error", "timeout", "memory", "output", "failure"]
"""The end of a program: by itself with exit code 0 (`ok`) or another one, or by a signal (`error`); at a limit; or not
at all, because the sandbox could not run it (`failure`), which says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program, of all its processes together unless a field is of one process."""

    seconds: float = 10.0
    """Wall-clock time."""
    cpu_seconds: int = 10
    """Time of one process on a core."""
    memory_mib: int = 512
    """Memory and swap, without those of files on a disk."""
    processes: int = 16
    """Processes and threads at a time."""
    open_files: int = 64
    """Open files of one process."""
    tmp_mib: int = 32
    """Space in /tmp, and the largest file there."""
    output_kib: int = 256
    """Standard output and error."""


@dataclass(frozen=True)
class Program:
    """A program to run: Python source, or the words of a command."""

    source: str = ""
    """Python."""
    argv: tuple[str, ...] = ()
    """A command, in place of `source`."""
    stdin: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Texts to put below /tmp, where it runs, by relative name."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program."""

    verdict: Verdict
    code: int = 0
    """Exit code; 0 if a signal ended it."""
    signal: int = 0
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    why: str = ""
    """Reason in words, if the verdict is not `ok`."""


@dataclass(frozen=True)
class Start:
    """The command that starts a zygote in a sandbox."""

    words: list[str]
    name: str
    """Name of the sandbox for logs, with its version."""
    fix: str = ""
    """The remedy if it does not start."""
    once: bool = False
    """True if programs in one sandbox could reach each other, so that each needs its own."""


class SandboxError(RuntimeError):
    """No sandbox works on this machine, or it ended."""

    def __init__(self, why: str, fix: str = ""):
        """why: the reason. fix: what to do, which is a part of the message too."""
        super().__init__(f"{why}; {fix}" if fix else why)
        self.why, self.fix = why, fix
