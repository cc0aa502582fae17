"""Cgroups of sandboxes, on a folder that stands in for cgroup v2: files are named as the kernel's, and nobody obeys."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from spmdrl_sandbox import cgroup
from spmdrl_sandbox.base import Limits, Program, SandboxError
from spmdrl_sandbox.open import open_sandbox
from spmdrl_sandbox.warm import Warm

FILES = ("memory.max", "memory.swap.max", "pids.max", "cgroup.kill")
SCOPE = "user.slice/app.slice/run-1.scope"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The tree of a user session that hands memory and pids to the scopes of one slice."""
    scope = tmp_path / SCOPE
    scope.mkdir(parents=True)
    for place, controllers in ((scope, ""), (scope.parent, "memory pids"), (scope.parents[1], "cpu memory pids")):
        (place / "cgroup.subtree_control").write_text(controllers + "\n")
    own = tmp_path / "own"
    own.write_text(f"9:name=systemd:/elsewhere\n0::/{SCOPE}\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", own)
    mkdir = Path.mkdir

    def made(self, *args, **kwargs):
        """The kernel fills a cgroup with files when it is made."""
        mkdir(self, *args, **kwargs)
        if self.name.startswith(cgroup.NAME):
            for name in FILES:
                (self / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", made)
    rmdir = os.rmdir

    def removed(folder, **kwargs):
        """And removes them with it."""
        if os.path.basename(folder).startswith(cgroup.NAME):
            for file in Path(folder).iterdir():
                file.unlink()
        rmdir(folder, **kwargs)

    monkeypatch.setattr(os, "rmdir", removed)
    return tmp_path


def made_in(root: Path) -> list[str]:
    return [str(found.parent.relative_to(root)) for found in root.rglob(f"{cgroup.NAME}*")]


def test_a_sandbox_runs_in_a_cgroup_whose_bounds_follow_each_program(root):
    opened = open_sandbox("none")
    try:
        assert opened.group and made_in(root) == ["user.slice/app.slice"]
        files = {name: opened.group.folder / name for name in (*FILES, "cgroup.procs")}
        assert files["cgroup.procs"].read_text() == "0\n", "the first process has joined before it became the sandbox"
        for limits in (Limits(memory_mib=100, tmp_mib=10, processes=4), Limits(memory_mib=20, tmp_mib=5, processes=20)):
            for name in FILES:
                files[name].write_text("")
            assert opened.run(Program("print(1)"), limits).stdout == "1\n"
            most = limits.memory_mib + limits.tmp_mib + cgroup.SPARE_MIB
            said = [files[name].read_text() for name in FILES]
            assert said == [f"{most * 2**20}\n", "0\n", f"{limits.processes + cgroup.SPARE_TASKS}\n", ""]
    finally:
        opened.close()
    assert made_in(root) == []


def test_what_runs_in_it_is_ended_with_it(root):
    group = cgroup.make()
    assert group
    killed = group.folder / "cgroup.kill"
    killed.unlink()
    os.mkfifo(killed)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(killed.read_text()))
    reader.start()
    group.close()
    reader.join(10)
    assert said == ["1\n"] and made_in(root) == []
    group.close()


def test_cgroups_of_callers_that_were_killed_are_removed(root):
    ended = subprocess.Popen(["true"])
    ended.wait()
    slice_ = root / "user.slice/app.slice"
    for name in (f"{ended.pid}-0", f"{os.getpid()}-7", "not a number"):
        (slice_ / f"{cgroup.NAME}{name}").mkdir()
    group = cgroup.make()
    assert group
    left = {found.name.removeprefix(cgroup.NAME) for found in slice_.glob(f"{cgroup.NAME}*")}
    assert left == {f"{os.getpid()}-7", "not a number", group.folder.name.removeprefix(cgroup.NAME)}


def nothing_handed_on(root, monkeypatch):
    (root / "user.slice/app.slice/cgroup.subtree_control").write_text("cpu\n")


def no_unified_hierarchy(root, monkeypatch):
    (root / "own").write_text("4:memory:/\n")


def no_own_file(root, monkeypatch):
    (root / "own").unlink()


def an_empty_hierarchy(root, monkeypatch):
    shutil.rmtree(root / "user.slice")


def no_right_to_make_one(root, monkeypatch):
    def refused(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)


WITHOUT = [nothing_handed_on, no_unified_hierarchy, no_own_file, an_empty_hierarchy, no_right_to_make_one]


@pytest.mark.parametrize("change", WITHOUT, ids=lambda change: change.__name__)
def test_where_none_can_be_made_a_sandbox_runs_without(root, monkeypatch, change):
    change(root, monkeypatch)
    assert cgroup.make() is None
    opened = open_sandbox("none")
    try:
        assert opened.group is None and opened.run(Program("print(1)"), Limits()).stdout == "1\n"
    finally:
        opened.close()
    assert made_in(root) == []


def test_a_cgroup_that_takes_nothing_breaks_nothing(root, monkeypatch):
    """No process may join it, no file of it takes a value, and it cannot be removed."""

    rmdir = os.rmdir

    def refused(folder, **kwargs):
        if os.path.basename(folder).startswith(cgroup.NAME):
            raise OSError(16, "Device or resource busy")
        rmdir(folder, **kwargs)

    opened = open_sandbox("none")
    command = opened.command
    opened.close()
    monkeypatch.setattr(cgroup, "END_SECONDS", 0.1)
    made = cgroup.make()
    assert made
    for name in FILES:
        (made.folder / name).unlink()
        (made.folder / name).mkdir()
    (made.folder / "cgroup.procs").mkdir()
    monkeypatch.setattr(cgroup, "make", lambda: made)
    monkeypatch.setattr(os, "rmdir", refused)
    warm = Warm(command)
    assert warm.group is made and warm.run(Program("print(1)"), Limits()).stdout == "1\n"
    warm.close()
    warm.close()


def test_a_sandbox_that_does_not_start_leaves_no_cgroup(root):
    for command in (["no-such-program"], ["sh", "-c", "exit 3"]):
        with pytest.raises(SandboxError, match="exit code"):
            Warm(command)
    assert made_in(root) == []
