"""Tests that a program cannot see: right programs pass, wrong ones do not, and tricks come to nothing."""

import gzip
import json
from pathlib import Path

import pytest

from spmdrl_sandbox.base import Limits
from spmdrl_sandbox.open import AUTO
from spmdrl_sandbox.tests import Suite, run_tests
from tests.sandbox.opened import open_or_skip
from tests.sandbox.tricks import TRICKS

LIMITS = Limits(seconds=3.0)
HUMANEVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
SUITE = Suite(("assert double(2) == 4", "assert double([1]) == [1, 1]", "assert double('ab') == 'abab'"))
CHECK = Suite(("def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6",), entry="double")


@pytest.fixture(scope="module", params=AUTO)
def sandboxes(request):
    opened = [open_or_skip(request.param) for _ in range(2)]
    yield opened
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    ("source", "share", "verdict"),
    [
        ("def double(x): return x * 2", 1.0, "ok"),
        ("class Solution:\n    def double(self, x): return 2 * x", 1.0, "ok"),
        ("def double(x): return 4", 1 / 3, "ok"),
        ("def double(x): raise ValueError('no')", 0.0, "ok"),
        ("def triple(x): return 3 * x", 0.0, "ok"),
        ("def double(x) return 2 * x", 0.0, "error"),
        ("1 / 0", 0.0, "error"),
        ("def double(x):\n    while True: pass", 0.0, "timeout"),
        ("def double(x): return bytearray(10 ** 11) if x == 2 else 2 * x", 2 / 3, "ok"),
        ("x = []\ndef double(_):\n    while True: x.append(bytearray(10 ** 7))", 0.0, "memory"),
        ("def double(x): return lambda: x", 0.0, "ok"),
    ],
)
def test_tests_tell_right_programs_from_wrong_ones(sandboxes, source, share, verdict):
    found = run_tests(source, SUITE, *sandboxes, LIMITS)
    assert (found.share, found.verdict) == (share, verdict), found
    assert len(found.failures) == 3 and all(each is None or each for each in found.failures)


@pytest.mark.parametrize("suite", [SUITE, CHECK], ids=["assertions", "check"])
@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_passes_no_test(sandboxes, trick, suite):
    found = run_tests(TRICKS[trick], suite, *sandboxes, Limits(seconds=1.5))
    assert found.share == 0.0 and found.verdict != "failure", found
    right = run_tests("def double(x): return 2 * x", suite, *sandboxes, LIMITS)
    assert right.share == 1.0, right


def test_a_program_is_not_blamed_for_tests_that_end(sandboxes):
    for test in ("import os; os._exit(0)", "import os; os._exit(3)"):
        found = run_tests("def double(x): return 2 * x", Suite((test,)), *sandboxes, Limits(seconds=1.0))
        assert found.share == 0.0 and found.verdict == "failure", found


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval lies in ../shared/data beside the clone")
@pytest.mark.parametrize("sandboxes", AUTO[:1], indirect=True)
def test_parity_canonical_solutions_of_humaneval_pass_and_empty_ones_do_not(sandboxes):
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    assert len(rows) == 164
    wrong = []
    for row in rows:
        suite = Suite((row["test"],), row["entry_point"])
        right = run_tests(row["prompt"] + row["canonical_solution"], suite, *sandboxes, Limits(seconds=10.0))
        empty = run_tests(row["prompt"] + "    return None\n", suite, *sandboxes, Limits(seconds=10.0))
        wrong += [(row["task_id"], right, empty)] if right.share != 1.0 or empty.share != 0.0 else []
    assert wrong == []
