"""Adds up the seconds of each level of tests, prints them at the end of a run, and holds them to a budget in CI.

SPMDRL_TEST_BUDGET=1 pytest ...     fails if a level takes longer than its budget

The seconds of a level are those of its tests, added up. Where workers of pytest-xdist run tests at the same time, a
test's seconds include its waits for a core, so the sum is at least that of a serial run, and a budget is as tight or
tighter there. It is not the time that passes, which the printed line gives as well for a run of several workers.
"""

import os
import time
from collections import defaultdict
from pathlib import Path

BUDGET = {"unit": 900, "ranks": 2700, "engines": 1500, "e2e": 3600, "contract": 700, "plans": 2000}
"""Level -> seconds: about three times the time on two idle cores with AVX-512, and twice the time with AVX2."""

seconds: dict[str, float] = defaultdict(float)
began = time.monotonic()


def level_of(nodeid: str) -> str:
    """Level of a test: `unit` for tests/unit/test_x.py::test_y."""
    parts = Path(nodeid.split("::")[0]).parts
    return parts[parts.index("tests") + 1] if "tests" in parts[:-1] else "other"


def over() -> list[str]:
    """Returns a line for each level above its budget."""
    return [
        f"tests/{level} took {taken:.0f} s, its budget is {BUDGET[level]} s: see the slowest tests above"
        for level, taken in seconds.items()
        if taken > BUDGET.get(level, taken)
    ]


def pytest_runtest_logreport(report):
    """Adds the time of a test's setup, call or teardown to its level; with workers, their controller adds up all."""
    seconds[level_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session, exitstatus):
    """Fails a run that passed but took too long."""
    if os.environ.get("SPMDRL_TEST_BUDGET") and over() and not exitstatus:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    """Prints one line for all levels, and one for each level above its budget."""
    told = ", ".join(f"{level} {taken:.0f} s" for level, taken in sorted(seconds.items()))
    workers = getattr(terminalreporter.config.option, "numprocesses", None)
    beside = f" of {workers} workers, in {time.monotonic() - began:.0f} s" if workers else ""
    terminalreporter.write_line(f"levels: {told}{beside}")
    for line in over() if os.environ.get("SPMDRL_TEST_BUDGET") else []:
        terminalreporter.write_line(line, red=True)
