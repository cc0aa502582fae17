"""Holds findings of the doctor, one line each with the fix. Old Pythons import it: see `doctor_python.py`."""

from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


class Finding(NamedTuple):
    """Holds the result of one check."""

    name: str
    level: str
    """`ok`, `warn` (a run works, with less than it could have) or `fail` (a run will not work)."""
    said: str
    """The state of things, with figures and units."""
    fix: str = ""
    """The command or setting that mends it; empty where all is well."""

    def line(self, width: int = 0) -> str:
        """Returns the finding as one line. width: columns of the name."""
        return f"{self.level:<4} {self.name:<{width}}  {self.said}" + (f"; fix: {self.fix}" if self.fix else "")


def ok(name: str, said: str) -> Finding:
    """Makes the finding of a check that all is well."""
    return Finding(name, OK, said)


def warn(name: str, said: str, fix: str) -> Finding:
    """Makes the finding that something costs speed or safety."""
    return Finding(name, WARN, said, fix)


def fail(name: str, said: str, fix: str) -> Finding:
    """Makes the finding that something will end a run."""
    return Finding(name, FAIL, said, fix)


def either(bad: bool, needed: bool, name: str, said: str, fix: str) -> Finding:
    """Makes the finding `ok` unless bad; then `fail` where a run needs what is bad, else `warn`."""
    if not bad:
        return ok(name, said)
    return fail(name, said, fix) if needed else warn(name, said, fix)
