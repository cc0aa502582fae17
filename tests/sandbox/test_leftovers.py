"""Folders that programs leave: nothing of them is found by the next program, or stays on the disk."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl_sandbox.base import Limits, Program
from spmdrl_sandbox.inside import leftovers
from spmdrl_sandbox.open import open_sandbox
from tests.sandbox.attacks import LEFTOVERS

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def as_user(user: int, what) -> int:
    """The exit code of a copy of this process, as another user, that does something."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            what()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("user", sorted({os.getuid(), NOBODY}))
@pytest.mark.parametrize("attack", LEFTOVERS, ids=lambda attack: attack.name)
def test_whatever_a_program_leaves_is_removed(attack, user, place):
    """By root, and by a user whom the modes of its own folders keep out."""
    if os.getuid() not in (0, user):
        pytest.skip("only root becomes another user")
    beside, folder = place / "beside", place / "folder"
    beside.write_text("stays")
    folder.mkdir()
    words = [sys.executable, "-S", "-c", attack.source.format(tmp=folder, file=str(beside), folder=str(place))]
    assert b"kept" in subprocess.run(words, cwd=folder, check=True, capture_output=True).stdout
    assert os.listdir(folder)
    if user == os.getuid():
        leftovers.remove(str(folder))
    else:
        subprocess.run(["chown", "-R", "-h", str(user), folder], check=True)
        assert as_user(user, lambda: leftovers.remove(str(folder))) == 0
    assert os.listdir(place) == ["beside"] and beside.read_text() == "stays"


def test_a_folder_that_is_emptied_stays_with_its_mode(tmp_path):
    tmp_path.chmod(0o711)
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    leftovers.empty(str(tmp_path))
    assert os.listdir(tmp_path) == [] and tmp_path.stat().st_mode & 0o777 == 0o711


def test_files_with_names_of_any_length_are_counted_or_found_too_many(tmp_path):
    """A path may be short enough to list a folder, and too long to look at what is in it."""
    fits = pytest.importorskip("spmdrl_sandbox.supervisor", reason="no sandlock").fits
    place, found = os.open(tmp_path, os.O_RDONLY), []
    for _ in range(18):
        os.mkdir("d" * 240, dir_fd=place)
        place, above = os.open("d" * 240, os.O_RDONLY, dir_fd=place), place
        os.close(above)
        os.close(os.open("f" * 255, os.O_CREAT, dir_fd=place))
        found.append(fits(str(tmp_path), 1 << 30))
    os.close(place)
    deep = sum(found)
    assert 10 < deep < 17 and found == [True] * deep + [False] * (18 - deep)
    leftovers.empty(str(tmp_path))
    assert fits(str(tmp_path), 0)


def test_without_a_sandbox_a_program_finds_no_files_of_those_before_it():
    opened = open_sandbox("none")
    folder = Path(opened.folder.name)
    try:
        for attack in LEFTOVERS:
            source = attack.source.format(tmp=".", file="/nowhere", folder="/nowhere")
            assert "kept" in opened.run(Program(source), Limits()).stdout
            again = opened.run(Program("import os; print(os.listdir('.'), os.getcwd())"), Limits()).stdout
            assert again.startswith(f"[] {folder}/program-"), attack.name
            # That of the last one may be there until the next one starts.
            assert len(os.listdir(folder)) <= 1
        beside = "import os; os.mkdir('../closed', 0o300); os.mkdir('../closed/in', 0o300)"
        assert opened.run(Program(beside), Limits()).verdict == "ok"
    finally:
        opened.close()
    assert not folder.exists()
