"""CPU tests see no GPU and tests/gpu does, in one run or alone: the two conftest.py in a folder with a fake torch.

The stand-in is there because no GPU is: it finds those of CUDA_VISIBLE_DEVICES, two of them where that is not set.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = """
import os
from types import SimpleNamespace

version = SimpleNamespace(cuda={built!r}, hip=None)


def seen():
    return [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", {there!r}).split(",") if x]


cuda = SimpleNamespace(is_available=lambda: bool(seen()), seen=seen)
"""
ON_CPU = """
import os, subprocess, sys, torch


def test_on_cpu():
    assert not torch.cuda.is_available()
    child = "import sys, torch; sys.exit(torch.cuda.is_available())"
    assert subprocess.run([sys.executable, "-c", child]).returncode == 0
"""
ON_GPU = """
import os, pytest, torch


def tell():
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{os.getpid()} {','.join(torch.cuda.seen())}\\n")


@pytest.mark.parametrize("name", ["a b", "c"])
def test_sees(name):
    tell()


def test_fails():
    tell()
    assert "two" == "three"


def test_has_a_reason():
    pytest.skip("not of this kind")


def test_dies():
    tell()
    os._exit(7)
"""


def project(folder: Path, built: str | None, there: str) -> None:
    files = {
        "torch.py": TORCH.format(built=built, there=there),
        "tests/test_cpu.py": ON_CPU,
        "tests/gpu/test_gpu.py": ON_GPU,
        "pytest.ini": "[pytest]\ntestpaths = tests\npythonpath = .\naddopts = -rs --import-mode=importlib\n",
    }
    for name in ("tests/conftest.py", "tests/budget.py", "tests/gpu/conftest.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, text in files.items():
        (folder / name).write_text(text)


def run_there(folder: Path, *words: str, **environment: str) -> tuple[dict[str, int], list[list[str]], str]:
    """Returns (outcomes by kind, [process, GPUs it saw] of every test that reported, output)."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    hides = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SPMDRL_TESTS_GIVEN", "PYTHONPATH"}
    given = {k: v for k, v in os.environ.items() if k not in hides} | {"TOLD": str(told)} | environment
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *words]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=120)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout.splitlines()[-1])}
    lines = [line.split(" ", 1) for line in told.read_text().splitlines()] if told.exists() else []
    return counts, lines, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "1,3"])
def test_one_run_hides_gpus_from_cpu_tests_and_shows_them_to_those_of_the_gpu(tmp_path, given):
    project(tmp_path, "13.0", "0,1")
    counts, told, out = run_there(tmp_path, **({"CUDA_VISIBLE_DEVICES": given} if given else {}))
    assert counts == {"passed": 3, "failed": 2, "skipped": 1}, out
    assert {seen for _, seen in told} == {given or "0,1"} and len({pid for pid, _ in told}) == 4, told
    assert "assert 'two' == 'three'" in out and "exit code 7" in out and "not of this kind" in out, out


@pytest.mark.slow
def test_a_run_of_the_gpu_tests_alone_is_one_process(tmp_path):
    project(tmp_path, "13.0", "0,1")
    words = ["tests/gpu/test_gpu.py", "-k", "sees or fails"]
    counts, told, out = run_there(tmp_path, *words)
    assert counts == {"passed": 2, "failed": 1} and len({pid for pid, _ in told}) == 1, out
    counts, told, out = run_there(tmp_path, "tests/gpu", "tests/test_cpu.py", "-k", "cpu or sees")
    assert counts == {"passed": 3} and len({pid for pid, _ in told}) == 2, out


@pytest.mark.slow
@pytest.mark.parametrize("built", [None, "13.0"])
def test_without_a_gpu_its_tests_say_so(tmp_path, built):
    project(tmp_path, built, "")
    counts, told, out = run_there(tmp_path)
    assert counts == {"passed": 1, "skipped": 5} and told == [], out
    assert "torch sees no CUDA device on this machine" in out
