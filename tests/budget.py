"""Adds up the seconds of each level of tests, prints them at the end of a run, and holds them to a budget in CI.

It also prints the files that took most, with the CPU seconds that the test process and its descendants spent on them.

SPMDRL_TEST_BUDGET=1 pytest ...     fails if a level takes longer than its budget

The seconds of a level are those of its tests, added up. Where workers of pytest-xdist run tests at the same time, a
test's seconds include its waits for a core, so the sum is at least that of a serial run, and a budget is as tight or
tighter there. It is not the time that passes, which the printed line gives as well for a run of several workers.
"""

import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

BUDGET = {"unit": 1200, "ranks": 2700, "engines": 1500, "e2e": 3000, "contract": 900, "plans": 1200}
"""Level -> seconds: about three times the time on two idle cores with AVX-512, and twice the time with AVX2.

In a whole suite, contracts, plans and unit tests get only the time of a core that others leave (launch/test.sh).
"""

SLOWEST = 15
"""Number of slowest files that are printed."""

seconds: dict[str, float] = defaultdict(float)
files: dict[str, float] = defaultdict(float)
"""File -> seconds."""
cpu: dict[str, float] = defaultdict(float)
"""File -> CPU seconds."""
began = time.monotonic()


def level_of(nodeid: str) -> str:
    """Returns the level of a test: `unit` for tests/unit/test_x.py::test_y."""
    parts = Path(nodeid.split("::")[0]).parts
    return parts[parts.index("tests") + 1] if "tests" in parts[:-1] else "other"


def over() -> list[str]:
    """Returns a line for each level above its budget."""
    return [
        f"tests/{level} took {taken:.0f} s, its budget is {BUDGET[level]} s: see the slowest tests above"
        for level, taken in seconds.items()
        if taken > BUDGET.get(level, taken)
    ]


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, of its living descendants, and of ended processes that they waited for.

    Without psutil, as in the environment of the gyms, living descendants are not counted.
    """
    try:
        import psutil
    except ModuleNotFoundError:
        return sum(os.times()[:4])
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Counts the CPU seconds of a file from its first test to its last, because counting at every test is too slow."""
    name = item.nodeid.split("::")[0]
    if name not in cpu:
        cpu[name] = -cpu_seconds()
    result = yield
    if nextitem is None or nextitem.nodeid.split("::")[0] != name:
        # If tests of another file run between those of this file, only the tests before them count.
        cpu[name] = cpu[name] + cpu_seconds() if cpu[name] < 0 else cpu[name]
    return result


def pytest_runtest_logreport(report):
    """Adds the time of a test's setup, call or teardown to its level; with workers, their controller adds up all."""
    seconds[level_of(report.nodeid)] += report.duration
    files[report.nodeid.split("::")[0]] += report.duration


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Takes over the CPU seconds of a worker of pytest-xdist."""
    for name, taken in getattr(node, "workeroutput", {}).get("cpu", {}).items():
        cpu[name] += taken


def pytest_sessionfinish(session, exitstatus):
    """Fails a run that passed but took too long, if SPMDRL_TEST_BUDGET is set; hands a worker's CPU seconds on."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = dict(cpu)
    if os.environ.get("SPMDRL_TEST_BUDGET") and over() and not exitstatus:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    """Prints the slowest files and a line for all levels; with SPMDRL_TEST_BUDGET, also the levels above budget."""
    slowest = sorted(files, key=lambda name: -files[name])[:SLOWEST] if len(files) > 1 else []
    for name in slowest:
        terminalreporter.write_line(f"{files[name]:7.1f} s, CPU {cpu[name]:7.1f} s  {name}")
    told = ", ".join(f"{level} {taken:.0f} s" for level, taken in sorted(seconds.items()))
    workers = getattr(terminalreporter.config.option, "numprocesses", None)
    beside = f" of {workers} workers, in {time.monotonic() - began:.0f} s" if workers else ""
    terminalreporter.write_line(f"levels: {told}{beside}")
    for line in over() if os.environ.get("SPMDRL_TEST_BUDGET") else []:
        terminalreporter.write_line(line, red=True)
