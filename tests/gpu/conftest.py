"""Tests of this folder see the machine's GPUs, also in a run whose own process does not (`tests/conftest.py`).

There each of them runs in a process of its own, which also keeps a fault of one GPU kernel from the tests after it.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIVEN = "SPMDRL_TESTS_GIVEN"
NONE = "torch sees no CUDA device on this machine"


def as_given() -> dict[str, str]:
    """The environment with the GPUs that this run was started with."""
    environment = dict(os.environ)
    for name, value in json.loads(environment.pop(GIVEN)).items():
        environment.pop(name)
        environment |= {name: value} if value is not None else {}
    return environment


@functools.cache
def machine_has_gpus() -> bool:
    import torch

    if GIVEN not in os.environ:
        return torch.cuda.is_available()
    if not (torch.version.cuda or torch.version.hip):
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], env=as_given(), check=False).returncode == 0


@pytest.fixture(autouse=True)
def needs_cuda():
    """Skips every test of this folder, with the reason, where torch sees no CUDA device."""
    if not machine_has_gpus():
        pytest.skip(NONE)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test in another process where this one sees no GPU, and ends as it did there."""
    if GIVEN not in os.environ:
        return None
    name = f"{pyfuncitem.path.relative_to(ROOT)}::{pyfuncitem.nodeid.split('::', 1)[1]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", name]
        done = subprocess.run(command, cwd=ROOT, env=as_given(), capture_output=True, text=True, check=False)
        outcome = ElementTree.parse(file).find(".//testcase/*") if file.exists() else None
    if outcome is not None and outcome.tag == "skipped":
        pytest.skip(outcome.get("message", ""))
    if done.returncode:
        pytest.fail(f"in a process of its own: exit code {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return True
