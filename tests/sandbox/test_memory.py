"""The watcher's count of memory: all of a program's processes, whatever kind of memory they hold, and no other."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl_sandbox.base import Limits, Program
from spmdrl_sandbox.inside import watch
from tests.sandbox.opened import open_or_skip

MIB = 1 << 20
HOLDS = """
import mmap, os, sys
kind, path = sys.argv[1:]
if kind == "own":
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)
elif kind == "shared":
    held = mmap.mmap(-1, 64 << 20)
elif kind == "file":
    held = mmap.mmap(os.open(path, os.O_RDWR), 64 << 20)
if kind != "nothing":
    for place in range(0, 64 << 20, 4096):
        held[place] = 1
print(flush=True)
input()
"""


def held_by(kind: str, path: Path) -> int:
    """What the watcher counts of a process that holds 64 MiB of one kind of memory."""
    words = [sys.executable, "-S", "-c", HOLDS, kind, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"\n"
        held = watch.memory_of(str(child.pid))
        child.communicate(b"\n")
    assert child.returncode == 0 and watch.memory_of(str(child.pid)) == 0, "it has ended"
    return held


def kind_of_file_systems(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()


def test_memory_of_its_own_and_shared_memory_count_and_that_of_a_disk_does_not(tmp_path):
    file = tmp_path / "file"
    with open(file, "wb") as made:
        made.truncate(64 * MIB)
    nothing = held_by("nothing", file)
    assert nothing < 32 * MIB
    for kind in ("own", "shared"):
        assert abs(held_by(kind, file) - nothing - 64 * MIB) < 2 * MIB, kind
    # A tmpfs is memory.
    on_disk = kind_of_file_systems(tmp_path) != "tmpfs"
    assert abs(held_by("file", file) - nothing - (0 if on_disk else 64 * MIB)) < 2 * MIB


STATUS = """Name:\tx
RssAnon:\t{own} kB
RssFile:\t  999999 kB
RssShmem:\t {shared} kB
VmPTE:\t{tables} kB
VmSwap:\t{swap} kB
HugetlbPages:\t{huge} kB
"""


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A folder that stands in for /proc: swap and huge pages are not to be had on every machine."""
    monkeypatch.setattr(watch, "PROC", str(tmp_path))

    def process(pid: int, own=0, shared=0, tables=0, swap=0, huge=0) -> None:
        (tmp_path / str(pid)).mkdir()
        said = STATUS.format(own=own, shared=shared, tables=tables, swap=swap, huge=huge)
        (tmp_path / str(pid) / "status").write_text(said)

    return process


def test_every_kind_of_memory_counts(proc):
    proc(7, own=1, shared=10, tables=100, swap=1000, huge=10000)
    assert watch.memory_of("7") == 11111 << 10 and watch.memory_of("8") == 0
    proc(9)
    assert watch.memory_of("9") == 0


def test_processes_of_the_sandbox_itself_do_not_count(proc, tmp_path):
    """Those are the namespace's first process, the zygote, which is the watcher's parent, and the watcher."""
    for pid in (1, os.getppid(), os.getpid()):
        proc(pid, own=1 << 20)
    (tmp_path / "sys").mkdir()
    assert watch.memory_of_others(0) == 0
    others = [pid for pid in range(2, 9) if pid not in (os.getpid(), os.getppid())][:3]
    for pid, own in zip(others, (50, 300, 1000), strict=True):
        proc(pid, own=own, swap=5)
    # One that is smaller than a copy of the watcher takes nothing from the others.
    assert watch.memory_of_others(100 << 10) == (205 + 905) << 10


MAPS = """
import mmap, os, time
end = os.open("x", os.O_RDWR | os.O_CREAT)
os.ftruncate(end, 12 << 20)
for _ in range(12):
    if os.fork() == 0:
        held = mmap.mmap(end, 12 << 20)
        for place in range(0, len(held), mmap.PAGESIZE):
            held[place] = 1
        time.sleep(100)
time.sleep(100)
"""


def test_files_in_memory_count_for_each_process_that_maps_them():
    opened = open_or_skip("bubblewrap")
    try:
        limits = Limits(seconds=20.0, memory_mib=100, tmp_mib=16)
        ended = opened.run(Program(MAPS), limits)
        assert ended.verdict == "memory" and ended.seconds < 15.0, ended
        few = MAPS.replace("range(12)", "range(2)").replace("100)", "0.5)")
        assert opened.run(Program(few), limits).verdict == "ok"
    finally:
        opened.close()


def test_what_the_test_maps_is_what_it_says():
    """`mmap` without a file is shared memory, unless it is told otherwise."""
    with mmap.mmap(-1, 8 * MIB) as held:
        held.write(bytes(8 * MIB))
        lines = Path("/proc/self/status").read_text().splitlines()
        (shared,) = (int(line.split()[1]) for line in lines if line.startswith("RssShmem:"))
        assert shared >= 8 << 10
