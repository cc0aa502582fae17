"""Runs tests on a program that cannot see the tests.

The tests run in a separate sandbox, and the caller forwards their calls. The program receives the arguments of calls
and returns plain data. It does not run in the same process as the tests, so it can neither read the expected results,
nor change `assert` or `==`, nor end the tests with exit code 0.
"""

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from spmdrl_sandbox.base import Limits, Program, Verdict
from spmdrl_sandbox.session import INSIDE, Channel, Session
from spmdrl_sandbox.warm import Warm


@dataclass(frozen=True)
class Suite:
    """Tests of a program as Python code."""

    tests: tuple[str, ...]
    """Python source of each test: assertions, or a function `check(candidate)` as in HumanEval."""
    entry: str = ""
    """Name of the program's function that is passed to `check`."""
    prelude: str = ""
    """Python source that runs before each test, such as imports."""


@dataclass(frozen=True)
class Report:
    """The results of a program's tests."""

    failures: tuple[str | None, ...]
    """For each test, the reason why it failed, or None if it passed."""
    verdict: Verdict
    """Verdict of the program: `ok` if it was loaded and answered all calls, otherwise how it ended. It is `failure` if
    the test process ended without a report or sent an invalid message."""
    why: str = ""

    @property
    def share(self) -> float:
        """Fraction of the tests that passed."""
        return sum(each is None for each in self.failures) / max(1, len(self.failures))


def run_tests(source: str, suite: Suite, program: Warm, judge: Warm, limits: Limits) -> Report:
    """Run tests on a program.

    Args:
        source: Python source of the program.
        suite: the tests.
        program: sandbox for the program.
        judge: a different sandbox for the tests.
        limits: limits that apply to the program and also to the tests, in each case for all tests together.

    Raises:
        SandboxError: a sandbox ended.
    """
    until = time.monotonic() + limits.seconds
    session = Session(program, limits)
    try:
        loaded = session.load(source, limits.seconds)
        if loaded.verdict != "ok":
            why = f"{loaded.error}: {loaded.why}" if loaded.error else loaded.why
            return Report(tuple(why for _ in suite.tests), loaded.verdict, why)
        names = [name for name in loaded.value if isinstance(name, str)] if isinstance(loaded.value, list) else []
        # The test process has higher limits, because it stores the program's answers and sends them again.
        wider = replace(limits, memory_mib=2 * limits.memory_mib, output_kib=16 * limits.output_kib)
        return _judged(suite, names, session, Channel(judge, _program(), wider), until)
    finally:
        session.close()


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.keys() & {"call", "done"} else None


def _program() -> Program:
    return Program((INSIDE / "judge.py").read_text(encoding="utf-8"))


def _judged(suite: Suite, names: list[str], session: Session, channel: Channel, until: float) -> Report:
    """Forward calls from the tests to the program and its answers to the tests; return the report."""
    verdict: Verdict = "ok"
    why, answered = "", 0
    try:
        task = {"tests": suite.tests, "prelude": suite.prelude, "entry": suite.entry, "names": names}
        channel.send(task)
        while True:
            line = channel.receive(max(0.0, until - time.monotonic()) + 1.0)
            if line is None:
                ended = channel.outcome
                late = ended is None or ended.verdict == "timeout"
                reason = (ended.why if ended else "") or "exit code 0"
                why = why or ("time was up" if late else f"the tests ended: {reason}")
                if verdict == "ok":
                    # Only answers of the program can make the tests exceed their memory or output limit.
                    grown = ended is not None and ended.verdict in ("memory", "output") and answered
                    verdict = "timeout" if late else ended.verdict if ended and grown else "failure"
                return Report(tuple(why for _ in suite.tests), verdict, why)
            message = _read(line)
            if message is None:
                why = "the tests sent an invalid message"
                return Report(tuple(why for _ in suite.tests), "failure", why)
            if "done" in message:
                return Report(tuple(message["done"]), verdict, why)
            answer = session.ask(message, max(0.0, until - time.monotonic()))
            answered += 1
            if answer.verdict == "ok":
                channel.send({"value": answer.raw})
            else:
                if not answer.error and verdict == "ok":
                    # Keep the reason for the first failed call: the session has ended, so later reasons are vague.
                    verdict, why = answer.verdict, answer.why
                kind = answer.error or ("TimeoutError" if answer.verdict == "timeout" else "RuntimeError")
                channel.send({"error": [kind, answer.why]})
    finally:
        channel.close()
