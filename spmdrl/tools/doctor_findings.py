"""Findings of the doctor, one line each with the fix, and the first check: the version of Python.

An old Python imports this file, so it keeps to old syntax.
"""

import sys
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON = (3, 11)


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    level: str
    """`ok`, `warn` (a run works, with less than it could have) or `fail` (a run will not work)."""
    state: str
    """The facts, with figures and units."""
    fix: str = ""
    """The command or setting that mends it; empty if all is well."""

    def line(self, width: int = 0) -> str:
        """Return the finding as one line. width: columns of the name."""
        return f"{self.level:<4} {self.name:<{width}}  {self.state}" + (f"; fix: {self.fix}" if self.fix else "")


def ok(name: str, state: str) -> Finding:
    """Return the finding that all is well."""
    return Finding(name, OK, state)


def warn(name: str, state: str, fix: str) -> Finding:
    """Return the finding that something costs speed or safety."""
    return Finding(name, WARN, state, fix)


def fail(name: str, state: str, fix: str) -> Finding:
    """Return the finding that something will end a run."""
    return Finding(name, FAIL, state, fix)


def either(bad: bool, needed: bool, name: str, state: str, fix: str) -> Finding:
    """Return `ok` unless the state is bad; then `fail` if a run needs it to be good, else `warn`."""
    if not bad:
        return ok(name, state)
    return fail(name, state, fix) if needed else warn(name, state, fix)


def python(version: tuple = sys.version_info[:3]) -> Finding:
    """Check that the interpreter is new enough for the project."""
    state = f"{'.'.join(map(str, version))}, {sys.executable}"
    least = ".".join(map(str, PYTHON))
    return either(version < PYTHON, True, "Python", state, f"install {least} or later: PYTHON=... ./launch/install.sh")
