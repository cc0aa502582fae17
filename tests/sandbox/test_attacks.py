"""Hostile programs in the sandbox: nothing is reached, every limit holds, and nothing is left behind."""

import dataclasses
import os
import socket
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from spmdrl_sandbox.base import Limits
from spmdrl_sandbox.open import open_sandbox
from spmdrl_sandbox.session import Session
from tests.sandbox.attacks import ATTACKS, BOMBS, FILES, LEFTOVERS, NETWORK, PLAIN, PROCESSES, UNCOUNTED, UNPROMISED
from tests.sandbox.hostile import Traces, caller_in, idle_of, kept_in, start, wrong_after, wrong_end
from tests.sandbox.opened import EACH, below, open_or_skip, settled

LIMITS = Limits(seconds=1.5, cpu_seconds=5, memory_mib=128, tmp_mib=16, output_kib=64)
OF_THE_TABLE = {
    "files": FILES,
    "processes": PROCESSES,
    "network": NETWORK,
    "bombs": BOMBS,
    "uncounted": UNCOUNTED,
    "leftovers": LEFTOVERS,
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """What the caller has and programs are after."""
    with caller_in(tmp_path_factory.mktemp("caller")) as words:
        yield words


@EACH
@pytest.mark.parametrize("of", OF_THE_TABLE)
def test_attacks_are_kept_in(of, provider, caller):
    promised = [attack for attack in OF_THE_TABLE[of] if attack.name not in UNPROMISED[provider]]
    folder = Path(caller["folder"])
    before = Traces.of(folder)
    assert kept_in(promised, provider, caller) == []
    assert before.differences(Traces.of(folder)) == []


@EACH
def test_what_a_sandbox_does_not_promise_does_succeed(provider, caller):
    """The table of what is not promised names nothing that is kept in."""
    warm = open_or_skip(provider)
    try:
        for attack in (each for each in ATTACKS if each.name in UNPROMISED[provider]):
            ended = start(attack, provider, warm, caller)
            assert "BREACH" in ended.stdout and wrong_end(attack, provider, ended), ended
    finally:
        warm.close()


def test_attacks_that_do_no_harm_succeed_without_a_sandbox(caller):
    """And the check that finds nothing in a sandbox finds each of them."""
    plain = open_sandbox("none")
    try:
        for attack in (each for each in ATTACKS if each.name in PLAIN):
            ended = start(attack, "none", plain, caller)
            assert "BREACH" in ended.stdout and "BREACH" in wrong_end(attack, "bubblewrap", ended), ended
    finally:
        plain.close()


@EACH
def test_the_check_of_attacks_sees_what_is_wrong(provider, caller):
    """An end that the table does not name, and a process that is left."""
    loops, quits = (next(a for a in ATTACKS if a.name == name) for name in ("loops", "reads /etc/passwd"))
    warm = open_or_skip(provider)
    try:
        idle = idle_of(warm)
        for attack, ends in ((loops, "memory"), (quits, "timeout"), (dataclasses.replace(quits, source="1"), "kept")):
            wrong = dataclasses.replace(attack, ends=ends, name="")
            assert "it did not end" in wrong_end(wrong, provider, start(attack, provider, warm, caller))
        assert wrong_after(provider, warm, idle) == ""
        # A program that has just ended may count as one process more for a moment.
        assert "where there were" in wrong_after(provider, warm, idle + 9, patience=0.5)
    finally:
        warm.close()


def test_the_check_of_traces_sees_each(tmp_path):
    # In a process of its own: what other tests have started may end meanwhile.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        alone.submit(sees_each, tmp_path / "folder").result()


def sees_each(folder: Path) -> None:
    folder.mkdir()
    kept = folder / "kept"
    kept.write_text("kept")
    before = Traces.of(folder)
    assert before.differences(Traces.of(folder)) == []
    with subprocess.Popen(["sleep", "100"]) as child:
        (line,) = before.differences(Traces.of(folder))
        assert line == f"processes are not as before: [{child.pid}]"
        child.kill()
    with open("/dev/null") as file:
        assert before.differences(Traces.of(folder)) == [f"open_files are not as before: ['{file.fileno()}']"]
    for change in (lambda: kept.chmod(0o600), lambda: os.utime(kept, (1, 1)), lambda: (folder / "new").touch()):
        change()
        after = Traces.of(folder)
        (line,) = before.differences(after)
        assert line.startswith("files are not as before") and str(folder) in line
        before = after


LISTENS = """
import socket
try:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, {protocol})
    listening.listen()
    print(listening.getsockname()[1])
except OSError:
    print(0)
"""


@EACH
@pytest.mark.parametrize("protocol", [0, 262], ids=["TCP", "MPTCP"])
def test_nobody_reaches_a_program_that_listens(provider, protocol):
    opened = open_or_skip(provider)
    try:
        session = Session(opened, LIMITS)
        port = int(session.run(LISTENS.format(protocol=protocol), 1.0).printed)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    finally:
        opened.close()


def test_names_of_attacks():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 130 and set(names) >= PLAIN
    assert UNPROMISED["bubblewrap"] == {} and set(UNPROMISED["sandlock"]) <= set(names)


@EACH
def test_nothing_is_left_when_a_sandbox_is_closed_in_the_middle(caller, provider):
    opened = open_or_skip(provider)
    session = Session(opened, LIMITS)
    session.run("import os\nfor _ in range(3):\n  if os.fork() == 0:\n    import time; time.sleep(1000)", 1.0)
    held = below(opened.process.pid)
    opened.close()
    assert len(held) >= 4 and settled(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held))
