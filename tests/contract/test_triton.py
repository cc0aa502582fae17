"""The Triton kernels compile for GPUs that are not here, by the triton of the CUDA build that the lock pins, and fit.

benchmarks/kernels/compiled.py does the work, all of it without --quick, here two shapes in bf16. The triton (200 MB,
and 700 unpacked) is downloaded once into the user's cache folder. Without a package index the tests are skipped and say
so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.sources import ROOT, UnreachableError, locked, pinned_by, unpacked

pytestmark = pytest.mark.timeout(900)
BENCH = ROOT / "benchmarks" / "kernels"
SPILLS = """
import sys
sys.argv[1:] = ["--quick", "--targets", "sm_90", "gfx942"]
import compiled
from spmdrl_kernels import triton_rows

launches_of = compiled.launches_of
triton_rows.STATS_LANES = 2**15
# One launch of many columns is enough.
compiled.launches_of = lambda *given: dict([*launches_of([(16, 2**17)], ["fp32"], *given[2:]).items()][:1])
compiled.main()
"""


@pytest.fixture(scope="module")
def triton() -> tuple[str, Path]:
    """Returns the version of triton that torch's CUDA wheel asks for, and its files."""
    try:
        version = pinned_by("torch", locked("gpu.txt")["torch"], "triton")
        return version, unpacked("triton", version)
    except UnreachableError as error:
        pytest.skip(str(error))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(BENCH), str(ROOT / "kernels")])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_kernel_compiled_code_fits_every_gpu(triton, tmp_path):
    version, folder = triton
    done = run(folder, str(BENCH / "compiled.py"), "--quick", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["about"]["versions"]["triton"] == version
    for target, kernel in ((t, k) for t in ("sm_80", "sm_90", "sm_100", "gfx942") for k in ("stats", "gradient")):
        rows = [row for row in told["rows"] if row["kernel"] == kernel and target in row]
        at = told["arguments"][kernel].index("columns")
        # Numbers at multiples of 16 and others, capped and plain.
        assert {row["arguments"].split()[at] for row in rows} == {"i32:D", "i32"}, (target, kernel)
        assert {row["constants"]["SOFTCAP"] for row in rows} == {None, 30.0}
        for row in rows:
            figures = dict(zip(told["figures"], row[target], strict=True))
            assert 8 < figures["registers"] <= 256 and figures["spilled"] == 0, row


def test_kernel_that_spills_is_named(triton):
    """65536 columns by 128 threads are more numbers than there are registers, which the test above must notice.

    One compiler spills them, the other takes more registers than a thread may have.
    """
    done = run(triton[1], "-c", SPILLS)
    lines = [line for line in done.stdout.splitlines() if ", at most" in line]
    named = [line.split()[0] for line in lines]
    assert done.returncode == 1 and named == ["sm_90", "gfx942"] and "spilled, at most 0" in lines[0], (
        done.stdout + done.stderr
    )
