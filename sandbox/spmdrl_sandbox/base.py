"""Types of the sandbox: a program, its limits and its outcome."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "error", "timeout", "memory", "output", "failure"]
"""How a program ended: with exit code 0 (`ok`); with another exit code or by a signal (`error`); or at a limit
(`timeout`, `memory`, `output`). `failure` means that the sandbox could not run the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program. All limits except the per-process ones apply to all of the program's processes together."""

    seconds: float = 10.0
    """Maximum wall-clock seconds."""
    cpu_seconds: int = 10
    """Maximum CPU seconds of a single process."""
    memory_mib: int = 512
    """Maximum memory and swap in MiB, without the page cache of files on a disk."""
    processes: int = 16
    """Maximum number of processes and threads at the same time."""
    open_files: int = 64
    """Maximum number of files that a single process may have open."""
    tmp_mib: int = 32
    """Maximum total size in MiB of the files in the program's working folder, and maximum size of each file."""
    output_kib: int = 256
    """Maximum size of standard output and standard error together, in KiB."""


@dataclass(frozen=True)
class Program:
    """A program to run: Python source, or a command."""

    source: str = ""
    """Python source to run."""
    argv: tuple[str, ...] = ()
    """Words of a command to run in place of `source`."""
    stdin: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Texts by relative path. They are written as files to the working folder before the program starts."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its output."""

    verdict: Verdict
    code: int = 0
    """Exit code, or 0 if a signal ended the program."""
    signal: int = 0
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    why: str = ""
    """Reason for a verdict other than `ok`, or an empty string for `ok`."""


@dataclass(frozen=True)
class Start:
    """The command that starts a sandbox with a zygote, the process that forks programs (`inside/zygote.py`)."""

    words: list[str]
    name: str
    """Name of the sandbox for logs, with its version."""
    fix: str = ""
    """Advice for the user if the sandbox does not start."""
    once: bool = False
    """True if each program needs a fresh sandbox, because programs in the same sandbox could reach each other."""


class SandboxError(RuntimeError):
    """No sandbox works on this machine, or an open sandbox failed."""

    def __init__(self, why: str, fix: str = ""):
        """Create the error. why: the reason. fix: advice for the user, which is appended to the message."""
        super().__init__(f"{why}; {fix}" if fix else why)
        self.why, self.fix = why, fix
