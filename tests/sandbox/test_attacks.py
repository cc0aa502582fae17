"""Hostile programs in the sandbox: nothing is reached, every limit holds, and nothing is left behind."""

import os
import socket
from pathlib import Path

import pytest

from spmdrl.sandbox.base import Limits, Program
from spmdrl.sandbox.open import AUTO, open_sandbox
from spmdrl.sandbox.session import Session
from tests.sandbox.attacks import ATTACKS, ENDS, PLAIN, UNPROMISED
from tests.sandbox.opened import EACH, below, open_or_skip, settled

LIMITS = Limits(seconds=1.5, cpu_seconds=5, memory_mib=128, tmp_mib=16, output_kib=64)


def rows(promised: bool):
    """The attacks on each sandbox that it promises to keep in, or the others."""
    found = [(p, a) for p in AUTO for a in ATTACKS if (a.name not in UNPROMISED[p]) == promised]
    ids = [f"{p}-{a.name}" for p, a in found]
    return pytest.mark.parametrize(("provider", "attack"), found, ids=ids, indirect=["provider"])


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """What the caller has and programs are after."""
    folder = tmp_path_factory.mktemp("caller")
    secret = folder / "secret"
    secret.write_text("secret")
    unix, abstract = str(folder / "socket"), f"spmdrl-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        by_path.bind(unix)
        by_name.bind("\0" + abstract)
        for each in (server, by_path, by_name):
            each.listen(64)
        words = {"file": str(secret), "folder": str(folder), "port": server.getsockname()[1], "pid": os.getpid()}
        yield words | {"unix": unix, "abstract": abstract}


@pytest.fixture(scope="module")
def provider(request):
    return request.param


@pytest.fixture(scope="module")
def warm(provider):
    """A sandbox that all attacks share, one after another."""
    opened = open_or_skip(provider)
    # A supervisor starts the process of the next program after the probe.
    assert settled(lambda: len(below(opened.process.pid)) > 0)
    yield opened
    opened.close()


FOLDER = {"bubblewrap": "/tmp", "sandlock": "."}
"""Where programs may write. Below sandlock /tmp is that of the machine, and a program sees nothing of it."""


@rows(promised=True)
def test_an_attack_is_kept_in(attack, provider, warm, caller):
    before = len(below(warm.process.pid))
    ended = warm.run(Program(attack.source.format(**caller, tmp=FOLDER[provider])), LIMITS)
    assert "BREACH" not in ended.stdout, ended
    assert ended.verdict != "failure", ended
    ends = ENDS[provider].get(attack.name, attack.ends)
    if ends == "kept":
        assert ended.verdict == "ok" and "kept" in ended.stdout, ended
    elif ends != "ended":
        assert ended.verdict == ends, ended
    assert ended.seconds < LIMITS.seconds + 1.0
    # The next program is as well off as the first, and nothing of this one is left.
    again = warm.run(Program(f"import os; print(os.listdir('{FOLDER[provider]}'), os.getcwd())"), LIMITS)
    assert again.stdout.startswith("[] /tmp"), again
    assert settled(lambda: len(below(warm.process.pid)) == before)


@rows(promised=False)
def test_what_a_sandbox_does_not_promise_does_succeed(attack, provider, warm, caller):
    """The table of what is not promised names nothing that is kept in."""
    ended = warm.run(Program(attack.source.format(**caller, tmp=FOLDER[provider])), LIMITS)
    assert "BREACH" in ended.stdout, ended


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.name in PLAIN], ids=lambda attack: attack.name)
def test_an_attack_succeeds_without_a_sandbox(attack, caller):
    plain = open_sandbox("none")
    try:
        ended = plain.run(Program(attack.source.format(**caller, tmp=".")), LIMITS)
    finally:
        plain.close()
    assert "BREACH" in ended.stdout, ended


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
    assert len(set(names)) == len(names) >= 100 and set(names) >= PLAIN
    assert UNPROMISED["bubblewrap"] == {} and set(UNPROMISED["sandlock"]) <= set(names)


@EACH
def test_nothing_is_left_when_a_sandbox_is_closed_in_the_middle(caller, provider):
    opened = open_or_skip(provider)
    session = Session(opened, LIMITS)
    session.run("import os\nfor _ in range(3):\n  if os.fork() == 0:\n    import time; time.sleep(1000)", 1.0)
    held = below(opened.process.pid)
    opened.close()
    assert len(held) >= 4 and settled(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held))
