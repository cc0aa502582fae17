"""Defines the doctor's findings, and its first check: the Python version.

Old Python versions must be able to import this file, so it uses only old syntax.
"""

import sys
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON = (3, 11)


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    level: str
    """`ok`, `warn` (runs work, but slower or less safely) or `fail` (runs will not work)."""
    state: str
    """Result of the check, with numbers and units."""
    fix: str = ""
    """The command or setting that fixes the problem, or empty if there is none."""

    def line(self, width: int = 0) -> str:
        """Format the finding as one line. width: number of characters to pad the name to."""
        return f"{self.level:<4} {self.name:<{width}}  {self.state}" + (f"; fix: {self.fix}" if self.fix else "")


def ok(name: str, state: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, OK, state)


def warn(name: str, state: str, fix: str) -> Finding:
    """Return a finding about a problem that makes runs slower or less safe."""
    return Finding(name, WARN, state, fix)


def fail(name: str, state: str, fix: str) -> Finding:
    """Return a finding about a problem that makes runs fail."""
    return Finding(name, FAIL, state, fix)


def either(bad: bool, needed: bool, name: str, state: str, fix: str) -> Finding:
    """Return an `ok` finding if not `bad`. Otherwise return a `fail` finding if `needed`, or else a `warn` finding."""
    if not bad:
        return ok(name, state)
    return fail(name, state, fix) if needed else warn(name, state, fix)


def python(version: tuple = sys.version_info[:3]) -> Finding:
    """Check that the interpreter is new enough for the project."""
    state = f"{'.'.join(map(str, version))}, {sys.executable}"
    least = ".".join(map(str, PYTHON))
    return either(version < PYTHON, True, "Python", state, f"install {least} or later: PYTHON=... ./launch/install.sh")
