"""A sandbox by sandlock (https://github.com/multikernel/sandlock): Landlock, seccomp and limits, without namespaces.

It serves machines whose users may make no user namespaces. It promises less than bubblewrap: docs/sandbox.md says what.
"""

import ctypes
import os
import stat
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from spmdrl_sandbox.base import SandboxError, Start
from spmdrl_sandbox.places import FLAGS, HERE, USER, home, packages

LEAST = 6
"""The first Landlock that keeps signals and abstract sockets in: Linux 6.12."""
_CREATE_RULESET, _VERSION = 444, 1
HOW = "on Linux 6.12 or later with Landlock among its security modules (`lsm=landlock`), `pip install sandlock`"


def start() -> Start:
    """Return how to start a supervisor.

    Raises:
        SandboxError: the package or the kernel's Landlock is missing.
    """
    package = find()
    if package is None:
        raise SandboxError("no sandlock here, in which code of a model could run", HOW)
    which, folder = package
    found = landlock()
    if found < LEAST:
        support = f"Landlock {found}, and it needs {LEAST}" if found > 0 else "no Landlock"
        raise SandboxError(f"sandlock {which}: this kernel has {support}", HOW)
    path = f"{HERE.parent}:{folder}"
    words = ["env", f"PYTHONPATH={path}", sys.executable, *FLAGS, "-m", "spmdrl_sandbox.supervisor"]
    return Start(words, f"sandlock {which} (Landlock {found}, programs as user {user() or os.getuid()})", HOW)


def find() -> tuple[str, str] | None:
    """Return the package's version and the folder it lies in; None without it. It is not imported here: it is large."""
    spec = find_spec("sandlock")
    return (version("sandlock"), str(Path(spec.origin).parents[1])) if spec and spec.origin else None


def landlock() -> int:
    """Return the version of this kernel's Landlock (https://docs.kernel.org/userspace-api/landlock.html); 0: none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION))


def user() -> int:
    """Return the user that programs become: `USER` below root, where that one can read this Python; else 0, none."""
    if os.getuid():
        return 0
    above = {folder for place in (home(), packages()) for folder in (Path(place), *Path(place).parents)}
    return USER if all(folder.stat().st_mode & stat.S_IXOTH for folder in above) else 0
