"""Ordinary programs run in a sandbox as they do elsewhere: the filter of system calls takes nothing that they need."""

import sys
from collections import Counter

import pytest

from spmdrl_sandbox.base import Limits, Program
from spmdrl_sandbox.open import AUTO
from tests.sandbox.opened import open_or_skip

LIMITS = Limits(seconds=60.0, cpu_seconds=60, memory_mib=1024)
SQLITE = """
import os, sqlite3, tempfile
for mode in ("delete", "wal"):
    path = os.path.join(tempfile.mkdtemp(), "x.db")
    first = sqlite3.connect(path, isolation_level=None)
    first.execute(f"pragma journal_mode={mode}")
    first.execute("create table t (x)")
    first.execute("begin immediate")
    first.execute("insert into t values (1)")
    # fcntl's locks keep processes apart.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sqlite3.connect(path, timeout=0).execute("insert into t values (2)")
        except sqlite3.OperationalError as error:
            code = 0 if "locked" in str(error) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    first.execute("commit")
    print(first.execute("select x from t").fetchall())
"""
FILES = """
import gzip, mmap, os, shutil, socket, tempfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as named, tempfile.TemporaryFile() as free:
    named.write(b"named"); named.flush(); free.write(b"free"); free.seek(0)
    print(open(named.name).read(), free.read().decode(), os.listdir(folder))
    with gzip.open(f"{folder}/z", "wb") as file: file.write(b"packed")
    print(gzip.open(f"{folder}/z").read().decode())
    with open(f"{folder}/m", "w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as held: held[:5] = b"maps!"
        print(file.read(5).decode())
with open("from", "w+b") as file:
    file.write(b"copied"); file.flush(); file.seek(0)
    print(open(shutil.copyfile("from", "to")).read())
    one, other = socket.socketpair()
    print(one.sendfile(file), other.recv(6).decode())
print(os.popen("cat from; cp from by; cat by").read())
with mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
    held.write(b"own"); print(held[:3].decode())
"""
PROCESSES = """
import asyncio, concurrent.futures, os, resource, subprocess, sys, threading
words = [sys.executable, "-c", "print(input())"]
print(subprocess.run(words, input="child", capture_output=True, text=True).stdout, end="")
with subprocess.Popen(["sh", "-c", "echo a"], stdout=subprocess.PIPE) as first:
    print(subprocess.run(["cat"], stdin=first.stdout, capture_output=True, text=True).stdout, end="")
with concurrent.futures.ThreadPoolExecutor(4) as threads: print(sum(threads.map(abs, range(-9, 0))))
async def both(): return await asyncio.gather(asyncio.to_thread(len, "ab"), asyncio.sleep(0.01, 3))
print(asyncio.run(both()))
for which in (0, os.getpid()):
    soft, hard = resource.prlimit(which, resource.RLIMIT_NOFILE)
    resource.prlimit(which, resource.RLIMIT_NOFILE, (soft - 1, hard))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[1] - resource.getrlimit(resource.RLIMIT_NOFILE)[0])
lock = threading.Lock()
with lock: print(lock.locked())
"""
NUMBERS = """
import numpy
from numpy.linalg import inv
numbers = numpy.arange(1.0, 10001).reshape(100, 100) % 7 + numpy.eye(100)
print(round(float(numpy.trace(numbers @ inv(numbers))), 6))
kept = numpy.memmap("kept", dtype="f8", mode="w+", shape=(10,)); kept[:] = 3; kept.flush()
print(numpy.memmap("kept", dtype="f8", mode="r").sum())
"""
IMPORTS = """
import importlib, sys
failed = []
for name in {names}:
    try: importlib.import_module(name)
    except BaseException as error: failed.append((name, repr(error)))
print(failed)
"""
IMPORTABLE = sorted(
    name for name in sys.stdlib_module_names if name not in ("antigravity", "this", "idlelib", "turtle", "turtledemo")
)
PROGRAMS = {
    "sqlite3": (SQLITE, "[(1,)]\n[(1,)]\n"),
    "files": (FILES, "named free []\npacked\nmaps!\ncopied\n6 copied\ncopiedcopied\nown\n"),
    "processes": (PROCESSES, "child\na\n45\n[2, 3]\n2\nTrue\n"),
    "numpy": (NUMBERS, "100.0\n30.0\n"),
}


@pytest.fixture(scope="module", params=AUTO)
def warm(request):
    opened = open_or_skip(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_ordinary_program_runs(warm, name):
    source, printed = PROGRAMS[name]
    ended = warm.run(Program(source), LIMITS)
    assert (ended.verdict, ended.stdout) == ("ok", printed), ended


def test_pipes_of_a_shell(warm):
    """Below sandlock the signal of a child that ends can interrupt a fork, as docs/sandbox.md says."""
    source = "import subprocess\nended = subprocess.run('echo a | cat', shell=True, capture_output=True, text=True)\n"
    program = Program(source + "print(ended.returncode, ended.stdout, ended.stderr)")
    ended = Counter(warm.run(program, LIMITS).stdout.strip() for _ in range(10))
    worked = ended.pop("0 a", 0)
    if "sandlock" in warm.name:
        assert ended.keys() <= {"2  /bin/sh: 0: Cannot fork"} and worked >= 1, ended
    else:
        assert not ended and worked == 10


def test_modules_that_import_here_import_in_a_sandbox(warm):
    """All of the standard library: those of other systems import nowhere."""
    here = open_or_skip("none")
    try:
        failed_here = here.run(Program(IMPORTS.format(names=IMPORTABLE)), LIMITS).stdout
    finally:
        here.close()
    assert failed_here.startswith("[") and len(failed_here) < 5000
    ended = warm.run(Program(IMPORTS.format(names=IMPORTABLE)), LIMITS)
    assert (ended.verdict, ended.stdout) == ("ok", failed_here), ended


LIMITED = """
from resource import *
for name in ("AS", "CPU", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NICE", "RTPRIO"):
    print(*getrlimit(globals()[f"RLIMIT_{name}"]))
"""


def test_limits_of_a_program_are_those_that_were_asked_for(warm):
    limits = Limits(cpu_seconds=7, memory_mib=300, open_files=33, tmp_mib=9)
    ended = warm.run(Program(LIMITED), limits)
    wanted = (1324 << 20, 7, 33, 9 << 20, 1, 0, 0, 64, 0, 0)
    assert ended.stdout == "".join(f"{value} {value}\n" for value in wanted), ended


def test_processes_of_multiprocessing_run_where_there_is_shared_memory():
    opened = open_or_skip("bubblewrap")
    pool = "from multiprocessing import Pool, Value\nwith Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
    pool += "print(Value('i', 7).value)"
    try:
        ended = opened.run(Program(pool), LIMITS)
        assert (ended.verdict, ended.stdout) == ("ok", "[1, 2]\n7\n"), ended
    finally:
        opened.close()
