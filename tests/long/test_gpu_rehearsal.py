"""The whole of `gpu.sh --short` on a CPU: every stage in its small form, with the real vLLM, one after another.

    python -m pytest -s tests/long/test_gpu_rehearsal.py

CI runs the stages one by one (`tests/ranks/test_first_gpu_run.py`) and their report with made-up stages.
"""

import json
import os
import subprocess

import pytest

from benchmarks._gpu_stages import ROOT, TOTAL, chosen
from tests.builds import no_vllm


@pytest.mark.timeout(2700)
def test_every_short_stage_in_small(tmp_path):
    command = ["./benchmarks/gpu.sh", "--small", "--short", "--results", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    told = json.loads((tmp_path / "out" / "first_run_cpu.json").read_text())
    found = {stage["name"]: stage for stage in told["stages"]}
    print({name: round(stage["seconds"]) for name, stage in found.items()})
    wanted = chosen("", True)
    assert list(found) == [stage.name for stage in wanted]
    for stage in wanted:
        lacks = stage.name == "cumem" or ("vllm" in stage.modules and no_vllm())
        skipped = "skipped" if lacks else "ok"
        assert found[stage.name]["status"] == skipped, found[stage.name]["reason"] + done.stdout[-3000:]
        if stage.benchmark and not lacks:
            assert found[stage.name]["results"]["about"]["device"] == "cpu"
    assert done.returncode == 0 and told["seconds"] < 4 * TOTAL[True]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"first_run_cpu.{end}" for end in ("json", "md", "log")
    }
