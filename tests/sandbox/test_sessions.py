"""Programs and sessions in the sandbox: how they end, what they print, and the values that travel."""

import pickle
import time
from collections import Counter, namedtuple

import psutil
import pytest

from spmdrl_sandbox.base import Limits, Program, SandboxError
from spmdrl_sandbox.inside.values import NotPlainError, decode, encode
from spmdrl_sandbox.open import AUTO
from spmdrl_sandbox.session import Session
from spmdrl_sandbox.warm import Warm
from tests.sandbox.opened import below, open_or_skip

LIMITS = Limits(seconds=5.0)


@pytest.fixture(scope="module", params=AUTO)
def warm(request):
    opened = open_or_skip(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("program", "verdict", "code", "stdout"),
    [
        (Program("print(input(), end='')", stdin="häh\n"), "ok", 0, "häh"),
        (Program("import helper; print(helper.X, open('data/a').read())", files={"helper.py": "X = 3", "data/a": "b"}),)
        + ("ok", 0, "3 b\n"),
        (Program(argv=("/bin/sh", "-c", "cat; exit 3"), stdin="x"), "error", 3, "x"),
        (Program(argv=("no-such-program",)), "error", 127, ""),
        (Program("import sys; sys.exit('no')"), "error", 1, ""),
        (Program("import atexit; atexit.register(print, 'at exit'); print('first')"), "ok", 0, "first\nat exit\n"),
        (Program("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "error", 0, ""),
        (Program("1 / 0"), "error", 1, ""),
        (Program("def f(:"), "error", 1, ""),
        (Program("class E(Exception):\n  def with_traceback(self, t): raise self\nraise E"), "error", 1, ""),
        (Program("class E(SystemExit): code = property(lambda self: 1 / 0)\nraise E"), "error", 1, ""),
        (Program("import sys\nsys.stderr = sys.excepthook = None\n1 / 0"), "error", 1, ""),
    ],
)
def test_a_program_ends(warm, program, verdict, code, stdout):
    ended = warm.run(program, LIMITS)
    assert (ended.verdict, ended.code, ended.stdout) == (verdict, code, stdout), ended
    assert bool(ended.why) == (verdict != "ok")


def test_a_session_keeps_its_state_and_says_what_is_wrong(warm):
    session = Session(warm, LIMITS)
    assert session.run("x = 5\nx + 1", 2.0).printed == "6\n"
    assert session.load("def f(a, b=1):\n    print('called')\n    return {'a': (a, b)}\nclass Solution:\n  g = f", 2.0)
    told = session.call("f", [[1, {2.5}]], {"b": None}, 2.0)
    assert told.value == {"a": ([1, {2.5}], None)} and told.printed == "called\n"
    assert session.run("x / 0", 2.0).error == "ZeroDivisionError"
    assert session.call("f", [], {}, 2.0).error == "TypeError"
    assert "type object" in session.call("object", [], {}, 2.0).why or session.call("h", [], {}, 2.0).error
    assert session.run("import os; os._exit(3)", 2.0).verdict == "error"
    assert session.call("f", [1], {}, 2.0).why == "exit code 3" and session.close().code == 3


def test_a_call_that_takes_too_long_ends_its_session_and_no_other(warm):
    session = Session(warm, LIMITS)
    session.load("def f():\n    while True: pass", 2.0)
    assert session.call("f", [], {}, 0.5).verdict == "timeout"
    assert warm.run(Program("print(1)"), LIMITS).stdout == "1\n"


def test_a_program_can_forge_its_own_answers_alone(warm):
    session = Session(warm, LIMITS)
    write = "os.write(i, b'{\"value\": 7}\\nno answer\\n')"
    forge = f"import os\nfor i in range(3, 64):\n  try: {write}\n  except OSError: pass"
    session.run(forge, 2.0)
    answers = [session.call("f", [], {}, 2.0) for _ in range(3)]
    assert all(a.verdict == "error" or a.value in (7, None) for a in answers)
    session.close()
    assert warm.run(Program("print(1)"), LIMITS).stdout == "1\n"


class Bomb:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return open, (self.place, "w")


def test_a_pickle_in_an_answer_stays_bytes(warm, tmp_path):
    place = tmp_path / "made"
    bomb = pickle.dumps(Bomb(str(place)))
    session = Session(warm, LIMITS)
    session.load(f"def f(x): return [{bomb!r}, x]", 2.0)
    assert session.call("f", [bomb], {}, 2.0).value == [bomb, bomb] and not place.exists()
    session.close()
    with pytest.raises(NotPlainError, match="not an encoded value"):
        decode({"py/reduce": [{"py/function": "os.system"}, {"t": ["true"]}]})
    pickle.loads(bomb).close()
    assert place.exists(), "the bomb itself works"


def test_a_sandbox_that_does_not_start_says_why():
    with pytest.raises(SandboxError, match="exit code 1: no such option"):
        Warm(["sh", "-c", "echo no such option >&2; exit 1"])
    with pytest.raises(SandboxError, match="exit code 0: it printed nothing"):
        Warm(["true"])


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (value, value)
        for value in (None, True, 0, -(10**30), "ü\n", 1.5, float("inf"), [1, [2]], (1, (2,)), {1, 2}, frozenset({3}))
    ]
    + [({1: {"a": (2.5, b"\x00")}}, {1: {"a": (2.5, b"\x00")}}), (2 + 3j, 2 + 3j), ({}, {}), ((), ())]
    + [(Point(1, 2), (1, 2)), (Counter("aab"), {"a": 2, "b": 1}), (iter([1, 2]), [1, 2]), (bytearray(b"x"), b"x")],
)
def test_values_travel(value, told):
    back = decode(encode(value))
    assert back == told and type(back) is type(told)


def test_values_that_are_no_plain_data_are_refused():
    for value in (object(), [lambda: 0], {"a": open}):
        with pytest.raises(NotPlainError, match="plain data"):
            encode(value)
    for said in ({"x": 1}, {"s": [1], "t": []}, {"f": "text"}, {"d": [1]}, {"s": [{"d": []}]}, 1.5):
        with pytest.raises(NotPlainError, match="not an encoded value"):
            decode(said)


def test_a_caller_that_does_not_read_keeps_no_limit_from_being_looked_at(warm):
    """While nobody reads, a child of the session fills the pipe to the caller, and then memory."""
    flood = """
import os, time
if os.fork() == 0:
    time.sleep(0.3)
    for end in range(3, 64):
        try:
            os.set_blocking(end, False)
            for _ in range(8):
                os.write(end, b"x" * 60000)
                time.sleep(0.05)
        except OSError:
            pass
    held = []
    while True:
        held.append(b"y" * (1 << 24))
        if len(held) > 64: time.sleep(100)
"""
    session = Session(warm, Limits(seconds=20.0, cpu_seconds=20, memory_mib=128))
    session.run(flood, 2.0)
    began = time.monotonic()
    most = 0
    while time.monotonic() - began < 4.0:
        most = max(most, sum(psutil.Process(pid).memory_info().rss for pid in below(warm.process.pid) if exists(pid)))
        time.sleep(0.05)
    assert most < 600 << 20, most
    assert session.close().verdict == "memory"
    assert warm.run(Program("print(1)"), LIMITS).stdout == "1\n"


def exists(pid: int) -> bool:
    return psutil.pid_exists(pid)
