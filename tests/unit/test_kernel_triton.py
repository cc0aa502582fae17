"""The Triton kernels without a GPU: kernels/tests in Triton's interpreter, and compiled for GPUs that are not here.

In processes of their own: whether Triton interprets is decided when it is imported, once for all.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")


def run(tmp_path, *arguments, codes=(0,), **environment):
    paths = [str(ROOT), str(ROOT / "kernels")]
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = {**given, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in codes, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_kernel_triton_in_the_interpreter(tmp_path):
    out = run(
        tmp_path,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "kernels/tests/test_triton.py",
        CUDA_VISIBLE_DEVICES="",
    )
    assert " passed" in out and "skipped" not in out, out


@pytest.mark.slow
def test_kernel_triton_compiles_for_nvidia(tmp_path):
    """The installed triton compiles them, without limits; tests/contract/test_triton.py has limits."""
    path = tmp_path / "out.json"
    run(tmp_path, "benchmarks/kernels/compiled.py", "--quick", "--targets", "sm_90", "--json", str(path), codes=(0, 1))
    rows = json.loads(path.read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"stats", "results", "gradient"} and len(rows) > 40
    # An error stands in the place of the figures.
    assert not [row for row in rows if isinstance(row["sm_90"], str)]
