"""Seconds that each level of tests takes, told at the end of a run and held to a budget in CI.

SPMDRL_TEST_BUDGET=1 pytest ...     fails where a level takes longer than its budget
"""

import os
from collections import defaultdict
from pathlib import Path

BUDGET = {"unit": 900, "ranks": 2700, "engines": 1500, "e2e": 3600, "contract": 700}
"""Level -> seconds. About three times what two quiet cores with AVX-512 take, and twice what AVX2 takes."""

seconds: dict[str, float] = defaultdict(float)


def level_of(nodeid: str) -> str:
    """`unit` of tests/unit/test_x.py::test_y."""
    parts = Path(nodeid.split("::")[0]).parts
    return parts[parts.index("tests") + 1] if "tests" in parts[:-1] else "other"


def over() -> list[str]:
    """What is above its budget, in words."""
    return [
        f"tests/{level} took {taken:.0f} s, its budget is {BUDGET[level]} s: see the slowest tests above"
        for level, taken in seconds.items()
        if taken > BUDGET.get(level, taken)
    ]


def pytest_runtest_logreport(report):
    """Add up setup, call and teardown."""
    seconds[level_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session, exitstatus):
    """Fail a run that was fine but for its length."""
    if os.environ.get("SPMDRL_TEST_BUDGET") and over() and not exitstatus:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    """One line for all levels, and one for each that is over."""
    told = ", ".join(f"{level} {taken:.0f} s" for level, taken in sorted(seconds.items()))
    terminalreporter.write_line(f"levels: {told}")
    for line in over() if os.environ.get("SPMDRL_TEST_BUDGET") else []:
        terminalreporter.write_line(line, red=True)
