"""Sandboxes for the tests of this folder, which are skipped where none works; in CI they must."""

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import AUTO, open_sandbox
from spmdrl_sandbox.warm import Warm

EACH = pytest.mark.parametrize("provider", AUTO)


def open_or_skip(provider: str = "auto") -> Warm:
    """Opens a sandbox."""
    try:
        return open_sandbox(provider)
    except SandboxError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def below(pid: int) -> set[int]:
    """Processes below a process."""
    said = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in said.splitlines()[1:]]
    found, more = set(), {pid}
    while more:
        more = {p for p, parent in parents if parent in more}
        found |= more
    return found


def settled(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something holds in the end: the kernel takes a moment to end processes."""
    until = time.monotonic() + seconds
    # It may hold at one moment and not at the next, as when a sandbox starts what the next program becomes.
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.05)
    return held
