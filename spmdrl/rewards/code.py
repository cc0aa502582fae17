"""Rewards for programs, which run against hidden tests in the sandbox (docs/rewards.md, docs/sandbox.md).

`code` is 1 if all tests pass; `code_partial` is the fraction of tests that pass. Untrusted programs run only in the
sandbox; this process only sends inputs, receives outputs and compares them.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from spmdrl.config.rewards import is_service
from spmdrl.config.schema import SandboxConfig
from spmdrl.rewards.base import Reward, RewardInput, UngradedError
from spmdrl.rewards.code_tests import Case, Tests, read_tests, same_answer, same_text
from spmdrl.rewards.programs import completed, defines, program_of
from spmdrl_sandbox.base import Limits, Program, SandboxError
from spmdrl_sandbox.fusion import Fusion
from spmdrl_sandbox.open import open_for
from spmdrl_sandbox.session import Session
from spmdrl_sandbox.tests import run_tests
from spmdrl_sandbox.warm import Warm

RETRIES = 2
"""Maximum number of retries, each in a fresh sandbox, if the sandbox fails while grading."""
RESTARTS = 30.0
"""Maximum seconds per attempt for starting sandboxes, on top of the time for running programs."""
LEAST_OUTPUT_KIB = 256
RESULTS = ("passed", "wrong", "error", "timeout", "memory", "output")
"""Possible test results. The reward has one part per result: the fraction of tests with that result."""
PRELUDE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, pi, sqrt
from typing import *
"""
"""Imports that a graded function may omit. The coding sites from which the tasks were taken also add these imports."""


class CodeGrader:
    """`code` is 1 if the program passes all tests of its row (docs/programs.md), else 0. `code_partial` is the fraction
    of tests that the program passes. The program is the last fenced Python block, else the last block without a
    language, or the entire response if there is no block. If the prompt starts the tested function, a response may
    continue it. The parts `passed`, `wrong`, `error`, `timeout`, `memory` and `output` are the fractions of tests with
    that result. The part `format` is 1 if the program is in a fenced block.

    Programs are graded one at a time, in sandboxes that stay open.
    """

    def __init__(self, settings: SandboxConfig, partial_credit: bool):
        """Open the sandboxes. Raises SandboxError if no sandbox works on this machine."""
        self.settings, self.partial_credit = settings, partial_credit
        self.sandboxes: list[Warm] = []
        self.service = Fusion(settings.provider) if is_service(settings.provider) else None
        self.output_kib = LEAST_OUTPUT_KIB
        self.open()

    def open(self) -> None:
        """Open any sandboxes that are not open yet: one for programs, one for tests. SandboxFusion needs no sandbox."""
        while len(self.sandboxes) < 2 and not self.service:
            self.sandboxes.append(open_for(self.settings.provider))

    def close(self) -> None:
        """Close the sandboxes. Can be called repeatedly."""
        while self.sandboxes:
            self.sandboxes.pop().close()

    @property
    def note(self) -> str:
        """Return a log line with the name of the sandbox."""
        return f"programs run in {self.service.name if self.service else self.sandboxes[0].name}"

    def may_take(self, item: RewardInput) -> float:
        """Return the maximum grading time in seconds: the time limits of all attempts plus sandbox startup."""
        return (1 + RETRIES) * (self.settings.total_seconds + RESTARTS)

    def __call__(self, item: RewardInput) -> Reward:
        """Grade a response. Raises UngradedError if the tests cannot be read or run, or the sandbox keeps failing."""
        tests = read_tests(item.ground_truth, {"prompt": item.prompt} | item.extra)
        source, fenced = program_of(item.solution)
        name = tests.suite.entry if tests.suite else ""
        if defines(tests.start, name):
            source = completed(tests.start, name, item.solution)
        results = self._results(source, tests)
        parts = {name: results.count(name) / len(results) for name in RESULTS} | {"format": float(fenced)}
        share = parts["passed"]
        return Reward(share if self.partial_credit else float(share == 1.0), parts)

    def _results(self, source: str, tests: Tests) -> list[str]:
        why = ""
        for _ in range(1 + RETRIES):
            try:
                self.open()
                return self._graded(source, tests)
            except SandboxError as error:
                why = str(error)
                self.close()
        raise UngradedError(f"the sandbox failed {1 + RETRIES} times: {why}")

    def _graded(self, source: str, tests: Tests) -> list[str]:
        if self.service and (tests.suite or tests.name):
            raise UngradedError("SandboxFusion has no sessions: it can only run tests of standard input and output")
        self.output_kib = LEAST_OUTPUT_KIB
        if tests.suite:
            return self._by_suite(source, tests)
        # Allow wrong outputs of up to four times the size of the expected output.
        wanted = sum(len(repr(case.wanted)) for case in tests.cases)
        self.output_kib = LEAST_OUTPUT_KIB + wanted * 4 // 1024
        until = time.monotonic() + self.settings.total_seconds
        if not tests.name:
            return [self._by_text(source, case, until) for case in tests.cases]
        return list(self._by_calls(source, tests, until))

    def _limits(self, seconds: float) -> Limits:
        memory = self.settings.memory_mib
        return Limits(seconds=seconds, cpu_seconds=int(seconds) + 1, memory_mib=memory, output_kib=self.output_kib)

    def _by_text(self, source: str, case: Case, until: float) -> str:
        """Run a program on a test's input and compare its output with the expected output."""
        seconds = min(self.settings.seconds, until - time.monotonic())
        if seconds <= 0:
            return "timeout"
        ended = (self.service or self.sandboxes[0]).run(Program(source, stdin=case.given), self._limits(seconds))
        if ended.verdict == "failure":
            raise SandboxError(ended.why)
        if ended.verdict != "ok":
            return ended.verdict
        return "passed" if same_text(ended.stdout, case.wanted) else "wrong"

    def _by_calls(self, source: str, tests: Tests, until: float) -> Iterator[str]:
        """Call a function with each test's arguments, compare its return values, and yield one result per test.

        A single process handles all calls; if it dies, a new one handles the rest.
        """
        session: Session | None = None
        try:
            for case in tests.cases:
                left = until - time.monotonic()
                if left <= 0:
                    yield "timeout"
                    continue
                seconds, loads = min(self.settings.seconds, left), True
                if session is None:
                    session = Session(self.sandboxes[0], self._limits(left))
                    session.load(PRELUDE, seconds)
                    answer = session.load(source, seconds)
                    loads = answer.verdict == "ok"
                if loads:
                    answer = session.call(tests.name, case.given, {}, seconds)
                if answer.verdict == "ok":
                    yield "passed" if same_answer(answer.value, case.wanted) else "wrong"
                    continue
                if not (loads and answer.error):
                    session.close()
                    session = None
                yield _result(answer.verdict)
        finally:
            if session is not None:
                session.close()

    def _by_suite(self, source: str, tests: Tests) -> list[str]:
        suite = tests.suite
        assert suite is not None
        seconds = min(self.settings.total_seconds, self.settings.seconds * len(suite.tests))
        found = run_tests(source, suite, self.sandboxes[0], self.sandboxes[1], self._limits(seconds))
        if found.verdict == "failure":
            raise SandboxError(found.why)
        if fault := next((each for each in found.failures if each and each.startswith("RowError: ")), ""):
            raise UngradedError(fault.removeprefix("RowError: "))

        def result(failure: str | None) -> str:
            if failure is None:
                return "passed"
            if failure.startswith("AssertionError"):
                return "wrong"
            return "error" if found.verdict == "ok" else _result(found.verdict)

        return [result(each) for each in found.failures]


def _result(verdict: str) -> str:
    if verdict == "failure":
        raise SandboxError("it could not run a program")
    return verdict


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Return the reward `code` or `code_partial` with open sandboxes.

    settings: fields of `SandboxConfig`. Raises ValueError if no sandbox works.
    """
    try:
        return CodeGrader(SandboxConfig(**settings), name == "code_partial")
    except SandboxError as error:
        raise ValueError(f"--sandbox.provider {settings.get('provider', 'auto')}: {error}") from None
