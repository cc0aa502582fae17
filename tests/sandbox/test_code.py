"""The rewards `code` and `code_partial`: programs of all styles, tricks, rows and sandboxes that are at fault."""

import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.rewards import SANDBOXES
from spmdrl.config.schema import Config, RewardConfig, SandboxConfig
from spmdrl.plan.dry import sandbox_lines
from spmdrl.rewards.__main__ import main
from spmdrl.rewards.base import RewardError, RewardInput, UngradedError
from spmdrl.rewards.code import RESULTS, CodeGrader
from spmdrl.rewards.load import check_ungraded, load_reward
from spmdrl_sandbox.base import Limits, Program
from spmdrl_sandbox.open import PROVIDERS
from tests.sandbox.opened import open_or_skip, settled
from tests.sandbox.test_tests import HUMANEVAL
from tests.sandbox.tricks import TRICKS

STDIN = {"inputs": ["1 2\n", "3 4\n", "5 5\n", "0 0\n"], "outputs": ["3\n", "7\n", "10\n", "0\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4], [5, 5], [0, 0]], "outputs": [3, 7, 10, 0]}
UNIT = {"test_list": [f"assert add({a}, {b}) == {a + b}" for a, b in ((1, 2), (3, 4), (5, 5), (0, 0))]}
COMPLETED = {"prompt": "def add(a, b):\n", "entry_point": "add"}
READ = "a, b = map(int, input().split())\n"


HUGE = """
import os
def f(x):
    for end in range(3, 64):
        try: os.write(end, b'{"value": {"f": 1' + b'0' * 400 + b'}}\\n')
        except OSError: pass
    os._exit(0)
"""
INTERRUPT = """
import os, signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try: os.kill(1, number)
    except OSError: pass
"""
POLY = {
    "prompt": "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\ndef zero(xs):\n",
    "entry_point": "zero",
    "test": "def check(candidate):\n    for xs in ([1, 2], [-4, 2]): assert abs(poly(xs, candidate(xs))) < 1e-4",
}
SAYS = "print(*['output'] * 40, input())"
LOOKS = """
import ctypes, gc, os, sys
libc = ctypes.CDLL(None)
reads, writes = os.pipe()
frame = sys._getframe()
while frame:
    assert 'answer' not in frame.f_locals, 'an answer'
    frame = frame.f_back
libc.sbrk.restype = ctypes.c_void_p
top, looked, found = libc.sbrk(0) >> 20, 0, 0
for place in sorted({id(each) >> 20 for each in gc.get_objects()} | set(range(top - 8, top + 1))):
    for page in range(place << 20, place + 1 << 20, 4096):
        if libc.write(writes, ctypes.c_void_p(page), 1) == 1 and os.read(reads, 1):
            text = ctypes.string_at(page, 4096)
            looked += 1
            # What was printed, as it travels; here it stands in numbers.
            at = text.find(bytes([98, 51, 86, 48, 99, 72, 86, 48]) + bytes([73, 71, 57, 49]))
            found += text[at + 12 : at + 16] == bytes([100, 72, 66, 49]) if at >= 0 else 0
print('looked', looked > 500, found)
"""


@pytest.fixture(scope="module")
def grader():
    open_or_skip().close()
    made = CodeGrader(SandboxConfig(seconds=1.5, total_seconds=6.0, memory_mib=128), True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient():
    open_or_skip().close()
    made = CodeGrader(SandboxConfig(seconds=0.5, total_seconds=3.0, memory_mib=128), True)
    yield made
    made.close()


def grade(grader, program: str, truth: object, extra: dict | None = None):
    return grader(RewardInput("", program, truth, extra or {}))


@pytest.mark.parametrize(
    ("style", "start"),
    [(STDIN, READ), (CALLS, "def add(a, b):\n    "), (UNIT, "def add(a, b):\n    ")],
    ids=["stdin", "calls", "unit"],
)
def test_each_result_is_distinct_tokens(grader, impatient, style, start):
    give = "print({})" if style is STDIN else "return {}"
    endless = "any(iter(int, 1)) if a == 5 else 0; " + give.format("a + b")
    for body, passed, other in [
        (give.format("a + b"), 1.0, None),
        (give.format("a * b"), 0.25, "wrong"),
        (give.format("a + b if a < 4 else 1 / 0"), 0.75, "error"),
        ("while True: pass", 0.0, "timeout"),
        (f"x = [bytearray(10 ** 7) for _ in iter(int, 1)]; {give.format('a + b')}", 0.0, "memory"),
        ("print('x' * 10 ** 7) if __name__ else 0; " * (style is STDIN) + give.format("a + b"), None, "output"),
        ("1 +", 0.0, "error"),
        (endless, None, "timeout"),
    ]:
        if other == "output" and style is not STDIN:
            continue
        reward = grade(impatient if other == "timeout" else grader, f"```python\n{start}{body}\n```", style)
        assert set(reward.parts) == {*RESULTS, "format"} and reward.score == reward.parts["passed"]
        assert sum(reward.parts[name] for name in RESULTS) == pytest.approx(1.0) and reward.parts["format"] == 1.0
        assert passed is None or reward.score == passed, (body, reward)
        assert other is None or reward.parts[other] > 0, (body, reward)
        if other and passed is not None:
            assert reward.parts[other] == 1.0 - passed, (body, reward)


def test_a_right_program_may_have_much_to_say(grader):
    """The limit of its output follows what the tests want."""
    long = {"inputs": ["60000"] * 2, "outputs": ["\n".join(map(str, range(60000)))] * 2}
    assert grade(grader, "print(*range(int(input())), sep='\\n')", long).score == 1.0
    lists = {"fn_name": "f", "inputs": [[10000]] * 8, "outputs": [list(range(10000))] * 8}
    assert grade(grader, "def f(n): return list(range(n))", lists).score == 1.0


@pytest.mark.parametrize(
    ("program", "tests", "result"),
    [
        # Words that nobody reads, while the next call is larger than a pipe.
        (
            "import os\nos.write(3, b'{\"value\": []}\\n' + b'x' * 200000)\ndef f(x): return x",
            {"fn_name": "f", "inputs": [["y" * 100000]] * 2, "outputs": ["y" * 100000] * 2},
            None,
        ),
        # An answer that the tests hand back, and that grows on its way.
        (
            "import os\ndef f(x):\n    os.write(3, b'{\"value\": \"' + 'é'.encode() * 60000 + b'\"}\\n')\n    return x",
            {"test_list": ["assert f(f('a')) == 'b'"]},
            None,
        ),
        ("def f(x): raise StopIteration", {"test_list": ["assert all(map(lambda x: f(x) == x, [1, 2]))"]}, "error"),
        ("def f(x): return 10 ** 5000", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "error"),
        ("def f(x): return 10 ** 5000", {"test_list": ["assert f(1) == 1"]}, "error"),
        # A number too large for a float, on whatever pipe there is.
        (HUGE, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "error"),
        (HUGE, {"test_list": ["assert f(1) == 1"]}, "error"),
        # Signals to process 1 of its namespace, which must not count as a sandbox that failed.
        (INTERRUPT + "def f(x): return x + 1", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "wrong"),
        (INTERRUPT + "print(2)", {"inputs": ["1"], "outputs": ["1"]}, "wrong"),
    ],
)
def test_what_breaks_the_talk_is_the_programs_own_fault(grader, program, tests, result):
    began = time.monotonic()
    reward = grade(grader, program, tests)
    assert reward.score == 0.0 and time.monotonic() - began < 12, reward
    assert result is None or reward.parts[result] == 1.0, reward


def test_one_that_hangs_on_one_test_keeps_the_others(grader):
    """The rest of a call-style task goes on in another process."""
    program = "def add(a, b):\n    while a == 3: pass\n    return a + b"
    assert grade(grader, program, CALLS).score == 0.75
    assert grade(grader, READ + "while a == 3: pass\nprint(a + b)", STDIN).score == 0.75


def test_the_time_of_all_tests_together_is_bounded(impatient):
    began = time.monotonic()
    many = {"inputs": ["1 2"] * 40, "outputs": ["3"] * 40}
    reward = grade(impatient, READ + "import time; time.sleep(0.3); print(a + b)", many)
    assert 2 <= reward.parts["passed"] * 40 <= 10 and reward.parts["timeout"] >= 0.7
    assert time.monotonic() - began < 7


def test_all_or_nothing_is_another_reward(grader):
    strict = CodeGrader(grader.settings, False)
    try:
        assert grade(strict, READ + "print(a * b)", STDIN).score == 0.0
        assert grade(strict, READ + "print(a + b)", STDIN).score == 1.0
    finally:
        strict.close()


@pytest.mark.parametrize(
    ("program", "truth", "extra"),
    [
        ("class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b", CALLS, {}),
        ("from __future__ import annotations\ndef add(a, b): return gcd(a + b, 0)", CALLS, {}),
        ("def add(a, b):\n    print('to see')\n    return a + b", CALLS, {}),
        ("def add(a, b): return a + b\nif __name__ == '__main__': print(int(input()))", CALLS, {}),
        ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", STDIN, {}),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__': main()", STDIN, {}),
        ("    return a + b", UNIT | COMPLETED, {}),
        ("    return a + b\n```\nIt adds.\n```\nadd(1, 2)\n```", UNIT | COMPLETED, {}),
        ("```python\n    return a + b\n```", UNIT | COMPLETED, {}),
        ("```python\ndef add(a, b):\n    return a + b\n```", UNIT | COMPLETED, {}),
    ],
)
def test_programs_in_the_ways_that_people_write_them(grader, program, truth, extra):
    assert grade(grader, program, truth, extra).score == 1.0


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_gets_nothing(grader, trick):
    calls = {"fn_name": "double", "inputs": [[2], [3]], "outputs": [4, 6]}
    assert grade(grader, TRICKS[trick], calls).score == 0.0
    assert (
        grade(grader, TRICKS[trick] + "\nprint(__name__)", {"inputs": ["2", "3"], "outputs": ["4", "6"]}).score == 0.0
    )


def test_a_program_finds_nothing_of_the_one_before_in_its_memory(grader):
    right = {"inputs": ["1"], "outputs": ["output " * 40 + "1"]}
    assert grade(grader, SAYS, right).score == 1.0
    ended = grader.sandboxes[0].run(Program(LOOKS), Limits(seconds=10.0))
    assert ended.stdout == "looked True 0\n", ended


def test_tests_call_the_helpers_of_the_prompt_and_not_those_of_the_program(grader):
    right = "def zero(xs):\n    return -xs[0] / xs[1]"
    assert grade(grader, right, POLY).score == 1.0
    assert grade(grader, f"def poly(*any): return 0.0\n{right}", POLY).score == 1.0
    assert grade(grader, "def poly(*any): return 0.0\ndef zero(xs):\n    return 0.0", POLY).score == 0.0


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert f(lambda x: x + 1, 2) == 3", "a test passes a value of type function"),
        ("assert math.fabs(f(1, 2)) == 3", "a test cannot run .NameError: name 'math'"),
        ("import no_such_module\nassert f(1, 2) == 3", "a test cannot run .ModuleNotFoundError"),
    ],
    ids=["function", "import", "module"],
)
def test_a_test_that_is_at_fault_leaves_the_sample_out(grader, test, why):
    with pytest.raises(UngradedError, match=why):
        grade(grader, "def f(*any): return 3", {"test_list": [test]})


def test_a_program_cannot_say_that_a_test_is_at_fault(grader):
    for raised in ("ImportError", "NameError('math')", "type('RowError', (Exception,), {})('x')"):
        assert grade(grader, f"def f(*any): raise {raised}", {"test_list": ["assert f(1) == 3"]}).score == 0.0


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval lies beside the checkout")
def test_humaneval_by_its_own_rows(grader):
    with gzip.open(HUMANEVAL, "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows[::8]:
        right = grade(grader, f"```python\n{row['prompt']}{row['canonical_solution']}```", row)
        assert right.score == 1.0, (row["task_id"], right)
        assert grade(grader, row["canonical_solution"], row).score == 1.0, row["task_id"]
        assert grade(grader, "    pass\n", row).score == 0.0, row["task_id"]


def test_a_sandbox_that_ends_is_replaced_and_no_fault_of_the_program(grader):
    os.killpg(grader.sandboxes[0].process.pid, signal.SIGKILL)
    assert grade(grader, READ + "print(a + b)", STDIN).score == 1.0


def test_a_sandbox_that_ends_each_time_leaves_the_sample_without_a_score(grader, monkeypatch):
    opened = []
    plain = CodeGrader.open

    def open_and_kill(self):
        plain(self)
        opened.append(self.sandboxes[0])
        os.killpg(self.sandboxes[0].process.pid, signal.SIGKILL)

    monkeypatch.setattr(CodeGrader, "open", open_and_kill)
    grader.close()
    with pytest.raises(UngradedError, match="the sandbox failed 3 times"):
        grade(grader, READ + "print(a + b)", STDIN)
    assert len(opened) == 3
    monkeypatch.undo()
    assert grade(grader, READ + "print(a + b)", STDIN).score == 1.0


def test_a_row_that_cannot_be_read_is_left_out_and_named_in_the_pool(caplog):
    open_or_skip().close()
    grader = load_reward(RewardConfig(function="code"), SandboxConfig(seconds=2.0))
    try:
        grader.submit((3, 1, 0), RewardInput("", READ + "print(a + b)", "{malformed"))
        grader.submit((4, 0, 0), RewardInput("", READ + "print(a + b)", json.dumps(STDIN)))
        rewards = dict(grader.drain())
    finally:
        grader.close()
    assert rewards[4, 0, 0].score == 1.0 and not rewards[4, 0, 0].ungraded
    assert math.isnan(rewards[3, 1, 0].score) and "not valid JSON" in rewards[3, 1, 0].ungraded
    assert grader.ungraded == 1 and grader.timeouts == 0
    assert "could not grade prompt 3, sample 1, which is left out: tests are not valid JSON" in caplog.text


def test_more_ungraded_samples_than_allowed_end_the_job():
    cfg = RewardConfig(function="code")
    check_ungraded(0, 0, cfg, "a step")
    check_ungraded(3, 64, cfg, "a step")
    with pytest.raises(RewardError, match="4 of 64 samples of a step .* --reward.max-ungraded 0.05 .*doctor"):
        check_ungraded(4, 64, cfg, "a step")
    with pytest.raises(RewardError):
        check_ungraded(1, 64, RewardConfig(function="code", max_ungraded=0.0), "a step")


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval lies beside the checkout")
def test_the_reward_can_be_tried_on_rows_before_a_run(tmp_path, capsys):
    open_or_skip().close()
    with gzip.open(HUMANEVAL, "rt") as file:
        lines = list(file)[:4]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(lines))
    flags = ["try", "--data", str(rows), "--model.path", "tiny", "--reward.function", "code", "--json"]
    flags += ["--data.prompt-column", "prompt", "--data.answer-column", "test", "--sandbox.seconds", "2"]
    assert main(flags) == 0
    kinds = {(each["answers"], each["written"]): each["right"] for each in json.loads(capsys.readouterr().out)["kinds"]}
    assert kinds["gold", "column canonical_solution"] == 1.0
    assert kinds["garbage", "a program that leaves"] == kinds["garbage", "nothing"] == 0.0


def test_the_settings_know_the_sandboxes():
    assert set(SANDBOXES) == {"auto", *PROVIDERS}
    problems = [
        ("http://me:hunter22@host", "--sandbox.provider: the address contains a login"),
        ("http://host:port", "is not an address"),
        ("http://", "names no host"),
        ("bubblewrapp", "--sandbox.provider bubblewrapp: unknown; did you mean bubblewrap?"),
        ("ftp://x", "ftp://x"),
    ]
    for provider, words in problems:
        with pytest.raises(ConfigError, match=re.escape(words)):
            check(Config(sandbox=SandboxConfig(provider=provider)), 1)


def test_a_sandbox_that_is_not_here_ends_the_job_before_it_starts(monkeypatch, tmp_path):
    missing = tmp_path / "docker"
    monkeypatch.setenv("PATH", str(missing))
    with pytest.raises(ValueError, match="--sandbox.provider docker: .*docker"):
        load_reward(RewardConfig(function="code"), SandboxConfig(provider="docker"))


def test_a_dry_run_of_an_evaluation_names_the_sandbox():
    opened = open_or_skip()
    opened.close()
    words = "-m spmdrl.evaluate --dry-run --model.path tiny --data.eval builtin:addition-1 --run.device cpu"
    done = subprocess.run([sys.executable, *words.split(), "--reward.function", "code"], capture_output=True, text=True)
    assert done.returncode == 0 and f"sandbox  {opened.name}" in done.stdout.splitlines(), done.stdout + done.stderr
    assert sandbox_lines(Config(reward=RewardConfig(function="exact_match"))) == []


def test_nothing_is_left_of_a_grader_that_was_closed(tmp_path, monkeypatch):
    open_or_skip().close()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    grader = load_reward(RewardConfig(function="code", workers=2), SandboxConfig(seconds=2.0))
    grader.submit(1, RewardInput("", READ + "print(a + b)", STDIN))
    grader.drain()
    # Sandboxes of other tests are this process's children, too.
    workers = [each for each in psutil.Process().children() if "spmdrl.rewards.worker" in each.cmdline()]
    below = [child for worker in workers for child in worker.children(recursive=True)]
    assert any("zygote" in " ".join(each.cmdline()) or "supervisor" in " ".join(each.cmdline()) for each in below)
    grader.close()
    assert settled(lambda: not any(alive(each) for each in below)) and not list(tmp_path.iterdir())


def alive(process: psutil.Process) -> bool:
    """Whether a process runs: one that ended may wait for this machine's first process to look at it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
