"""A sandlock sandbox (https://github.com/multikernel/sandlock), which uses Landlock, seccomp and limits.

It works without namespaces, and is meant for machines where users cannot create user namespaces. It isolates less than
bubblewrap; docs/sandbox.md lists the differences.
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
"""Minimum version of Landlock (Linux 6.12), the first version that restricts signals and abstract sockets."""
_CREATE_RULESET, _VERSION = 444, 1
HOW = "on Linux 6.12 or later with Landlock among its security modules (`lsm=landlock`), `pip install sandlock`"


def start() -> Start:
    """Return the command that starts a supervisor, which runs programs in sandboxes (`supervisor.py`).

    Raises:
        SandboxError: the package `sandlock` is missing, or the kernel's Landlock is missing or too old.
    """
    package = find()
    if package is None:
        raise SandboxError("sandlock, which would isolate a model's code, is not installed", HOW)
    which, folder = package
    found = landlock()
    if found < LEAST:
        support = f"Landlock {found}, but {LEAST} is needed" if found > 0 else "no Landlock"
        raise SandboxError(f"sandlock {which}: this kernel has {support}", HOW)
    path = f"{HERE.parent}:{folder}"
    words = ["env", f"PYTHONPATH={path}", sys.executable, *FLAGS, "-m", "spmdrl_sandbox.supervisor"]
    return Start(words, f"sandlock {which} (Landlock {found}, programs as user {user() or os.getuid()})", HOW)


def find() -> tuple[str, str] | None:
    """Return the version and folder of the package `sandlock` without importing it, or None if it is not installed."""
    spec = find_spec("sandlock")
    return (version("sandlock"), str(Path(spec.origin).parents[1])) if spec and spec.origin else None


def landlock() -> int:
    """Return the kernel's Landlock version, or 0 if it has no Landlock.

    Source: https://docs.kernel.org/userspace-api/landlock.html
    """
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION))


def user() -> int:
    """Return the user id that programs switch to: `USER` if this process is root and `USER` can read this Python.

    The result is 0 if programs keep this process's user.
    """
    if os.getuid():
        return 0
    above = {folder for place in (home(), packages()) for folder in (Path(place), *Path(place).parents)}
    return USER if all(folder.stat().st_mode & stat.S_IXOTH for folder in above) else 0
