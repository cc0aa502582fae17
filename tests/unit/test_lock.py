"""One job in a run folder: the lock, the job that holds it, and the behaviour where there are no locks."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmdrl.checkpoint import lock
from spmdrl.checkpoint.folder import check_evaluation, check_still_owned, take_folder
from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import steps_saved
from spmdrl.health.status import rank_status
from tests.ranks.harness import run_ranks

ALONE = SimpleNamespace(is_first=True, rank=0, size=1, host_group=None)
HOLDER = """
import multiprocessing, sys, time
from pathlib import Path
from spmdrl.checkpoint import lock
mine = lock.take(Path(sys.argv[1]), 0)
mine.sign(["an agent"])
# A child that was forked, and outlives whoever kills this process.
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    yield
    while lock.held:
        lock.held.pop().release()
    rank_status.folder = None


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def holder(folder):
    """Starts another process that holds the folder, and its child."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process, child
    for pid in (child, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    process.stdout.close()


def test_second_job_is_refused_by_name_and_goes_on_once_the_first_was_killed(folder, holder):
    process, child = holder
    with pytest.raises(lock.InUseError) as refused:
        lock.take(folder, 0.3)
    for part in (str(folder), f"process {process.pid} on {os.uname().nodename}", "--run.dir", "wait until"):
        assert part in str(refused.value)
    with pytest.raises(ValueError, match="is in use by process"):
        take_folder(folder, True, ALONE, 0.2)
    assert folder.exists() and not Path(f"{folder}.old-1").exists(), "a folder in use is not moved aside"
    process.kill()
    process.wait()
    os.kill(child, 0)  # the child lives on, with the file open
    lock.take(folder, 0).release()


@pytest.mark.slow
def test_second_job_waits_for_one_that_ends(folder, holder):
    process, _ = holder
    began = time.monotonic()
    watcher = multiprocessing.get_context("spawn").Process(target=kill_later, args=(process.pid, 1.0))
    watcher.start()
    lock.take(folder, 30).release()
    watcher.join()
    assert 0.5 < time.monotonic() - began < 25


def kill_later(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


def test_file_that_was_removed_or_moved_is_not_the_folders_lock(folder, holder):
    """A job that waits for the lock of a folder that is moved aside meanwhile takes that of the new folder."""
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    lock.take(folder, 0).release()
    with pytest.raises(lock.InUseError):
        lock.take(folder.with_name("away"), 0)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_the_job_goes_on_with_a_warning_and_sees_another_come(folder, monkeypatch, code):
    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", none)
    notes = take_folder(folder, False, ALONE)
    assert len(notes) == 1 and notes[0].startswith(f"warning: {folder} is on a file system without locks")
    check_still_owned(ALONE)
    rank_status.folder = folder
    other = lock.take(folder, 0)
    other.sign([])
    with pytest.raises(lock.TakenError, match=f"was taken by another job, process {os.getpid()} on .*--run.dir"):
        check_still_owned(ALONE)
    assert rank_status.folder is None, "the flight record would go to the other's folder"
    other.release()


def test_folder_that_another_job_moved_aside_is_left_alone(folder, tmp_path):
    take_folder(folder, False, ALONE)
    check_still_owned(ALONE)
    os.rename(folder, tmp_path / "run.old-1")
    check_still_owned(ALONE)  # gone, and nobody else's
    folder.mkdir()
    (folder / lock.NAME).write_text(json.dumps({"token": "another", "pid": 7, "host": "node7", "since": 0}))
    with pytest.raises(lock.TakenError, match="process 7 on node7 .*the files of this run are in .*run.old-1"):
        check_still_owned(ALONE)


def test_looking_at_the_file_does_not_let_go_of_the_lock(folder, monkeypatch):
    """Closing any handle of a file lets go of what a process holds on it."""
    take_folder(folder, False, ALONE)
    stat = os.stat
    # Some file systems number files anew in this way.
    monkeypatch.setattr(os, "fstat", lambda handle: SimpleNamespace(st_dev=0, st_ino=0))
    assert lock.problem() == ""
    monkeypatch.undo()
    assert os.stat is stat
    code = "import sys; from pathlib import Path; from spmdrl.checkpoint import lock; lock.take(Path(sys.argv[1]), 0)"
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert f"is in use by process {os.getpid()}" in ended.stderr


@pytest.mark.parametrize("text", ["", "{", "3", "[]", '{"agents": 3}', '{"since": "x"}', "[" * 100000, "\xff\x00"])
def test_malformed_lock_files_count_as_nothing(folder, text):
    (folder / lock.NAME).write_text(text)
    assert take_folder(folder, False, ALONE) == []
    assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
    assert "process" in lock.owner_name({}) and lock.agents_of({"agents": [3]}) == set()


def robbed(world, folder: str, when: str) -> list[str]:
    """Runs a job whose folder another job moves aside and begins in anew, before or in the middle of a checkpoint."""
    from spmdrl.checkpoint import manifest
    from spmdrl.train import train
    from tests.ranks.demo import open_demo

    take_folder(Path(folder), False, world)
    run = open_demo(world, folder, {"run": {"steps": 2}, "eval": {"every": 0}, "checkpoint": {"every": 1}})
    save, write_manifest = run.checkpoint, manifest.write_manifest

    def rob() -> None:
        os.rename(folder, f"{folder}.old-1")
        theirs = Path(folder, "checkpoints", ".incomplete-step_2")
        theirs.mkdir(parents=True)
        (theirs / "theirs").touch()
        Path(folder, lock.NAME).write_text(json.dumps({"token": "another", "pid": 7, "host": "node7", "since": 0}))

    def checkpoint_(step: int) -> None:
        if step == 1 and when == "before" and world.is_first:
            rob()
        save(step)

    def write_manifest_(temporary: Path, step: int, *rest):
        write_manifest(temporary, step, *rest)
        if step == 2 and when == "in the middle":
            rob()

    run.checkpoint, manifest.write_manifest = checkpoint_, write_manifest_
    try:
        train(run)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_nothing_is_published_into_another_jobs_folder(tmp_path, when):
    folder = tmp_path / "run"
    for kind, said in run_ranks(robbed, 2, str(folder), when):
        assert kind == "TakenError" and "process 7 on node7" in said and "run.old-1" in said, said
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) == [
        ".lock",
        "checkpoints",
        "checkpoints/.incomplete-step_2",
        "checkpoints/.incomplete-step_2/theirs",
    ]
    mine = tmp_path / "run.old-1" / "checkpoints"
    assert steps_saved(mine) == [1] and problems(mine / "step_1") == []


# ── which job it is ──────────────────────────────────────────────────────────


def test_fresh_moves_the_folder_aside_and_deletes_nothing(folder, monkeypatch):
    parent = folder.parent
    assert take_folder(folder, False, ALONE) == []
    for index in (1, 2):
        (folder / "mark").write_text(str(index))
        assert take_folder(folder, True, ALONE) == [f"--run.fresh: {folder} is now {folder}.old-{index}"]
        assert [path.name for path in folder.iterdir()] == [lock.NAME]
        assert (parent / f"run.old-{index}" / "mark").read_text() == str(index)
    assert take_folder(folder, True, ALONE) == [], "there is nothing to move"
    (folder / "mark").touch()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.raises(ValueError, match="cannot be moved to .*run.old-3 .*another --run.dir"):
        take_folder(folder, True, ALONE)
    assert not lock.held


def attempts(folder: Path, monkeypatch, first: str, second: str) -> bool:
    """Makes two starts with --run.fresh, by launchers of these names; True where the second one went on."""
    (folder / "mark").touch()
    monkeypatch.setattr(lock, "launcher", lambda: first)
    assert len(take_folder(folder, True, ALONE)) == 1, "an older run was there"
    (folder / "mark").touch()
    monkeypatch.setattr(lock, "launcher", lambda: second)
    take_folder(folder, True, ALONE)
    return (folder / "mark").exists()


@pytest.mark.parametrize("first, second, goes_on", [("a", "a", True), ("a", "b", False), ("", "", False)])
def test_fresh_once_for_all_starts_of_one_torchrun(folder, monkeypatch, first, second, goes_on):
    # torchrun's count of restarts stands still on a node where no rank failed, and counts for nothing.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0" if goes_on else "1")
    assert attempts(folder, monkeypatch, first, second) is goes_on


@pytest.mark.parametrize("job, count, goes_on", [("12", "1", True), ("12", "0", False), ("13", "1", False)])
def test_fresh_once_for_all_starts_of_one_slurm_job(folder, monkeypatch, job, count, goes_on):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    take_folder(folder, True, ALONE)
    (folder / "mark").touch()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    take_folder(folder, True, ALONE)
    assert (folder / "mark").exists() is goes_on


def test_launcher_is_torchrun_also_behind_a_script(tmp_path):
    """This process stands for torchrun: it lacks the variable that it gives to its ranks."""
    code = "from spmdrl.checkpoint import lock; print(lock.launcher())"
    (tmp_path / "wrap.sh").write_text(f'{sys.executable} -c "{code}"\ntrue\n')
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    said = [
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
        for command in ([sys.executable, "-c", code], ["sh", str(tmp_path / "wrap.sh")])
    ]
    assert said[0] == said[1] and said[0].startswith(f"{os.uname().nodename}:{os.getpid()}:"), said
    assert len(said[0].split(":")) == 4
    assert lock.launcher() == "", "no torchrun started this one"


def test_fresh_moves_what_a_link_leads_to(tmp_path):
    disk, folder = tmp_path / "disk" / "run", tmp_path / "run"
    disk.mkdir(parents=True)
    folder.symlink_to(disk)
    (disk / "mark").touch()
    assert take_folder(folder, True, ALONE) == [f"--run.fresh: {disk} is now {disk}.old-1"]
    assert folder.is_symlink() and folder.resolve() == disk and (tmp_path / "disk" / "run.old-1" / "mark").exists()
    assert [path.name for path in disk.iterdir()] == [lock.NAME]


def test_fresh_does_not_move_the_working_directory(folder, monkeypatch):
    (folder / "mark").touch()
    (folder / "inner").mkdir()
    for at, name in ((folder, "."), (folder / "inner", "..")):
        monkeypatch.chdir(at)
        with pytest.raises(ValueError, match=f"--run.fresh: {folder} is or contains the working directory .*--run.dir"):
            take_folder(Path(name), True, ALONE)
    assert (folder / "mark").exists()


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to .*--run.dir"):
        take_folder(tmp_path / "file" / "run", False, ALONE)


def test_evaluation_does_not_go_on_from_a_runs_checkpoints(folder):
    check_evaluation(folder, ALONE)
    check_evaluation(folder / "none", ALONE)
    (folder / "checkpoints" / "step_3").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds the checkpoints of a run.*--run.dir"):
        check_evaluation(folder, ALONE)
