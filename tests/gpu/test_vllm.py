"""One real vLLM engine on a GPU beside the trainer, measured by `tests/engines/probe.py`, as on a CPU in tests/engines.

The engine runs without CUDA graphs, which `benchmarks/colocated.py` covers: their capture takes most of a start. On an
H200 |dlogp| was at most 9e-5 after five updates, by `TRITON_F32_DEFAULT=ieee`: products in TF32 would make it 0.01.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from spmdrl.config.engines import vllm_wants_gpu

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (find_spec("vllm") and vllm_wants_gpu()), reason="vLLM's CUDA build is not installed"),
]
MEAN, MOST = 1e-4, 1e-3
"""Largest mean and largest |dlogp| of engine and trainer."""


def measured(scenario: str, folder: Path) -> dict:
    """Returns the facts of a scenario, in a process of its own."""
    command = [sys.executable, "-m", "tests.engines.probe", str(folder), scenario]
    subprocess.run(command, cwd=ROOT, timeout=280, check=False)  # with -s, a log has its figures as they come
    file = folder / f"{scenario}.json"
    facts = json.loads(file.read_text()) if file.exists() else {"failed": "no facts"}
    assert "failed" not in facts, facts["failed"]
    assert facts["engine"] == "VLLMEngine" and facts["device"] == "cuda:0" and facts["rng_untouched"]
    return facts


def agrees(row: dict, tokens: int = 40) -> None:
    """tokens: least number of tokens that the row measured."""
    assert row["tokens"] >= tokens and row["spread"] > 0.1, row
    assert row["engine_trainer_mean"] < MEAN and max(row["engine_trainer"], row["engine_hf"]) < MOST, row


def test_parity_stale_sleep_and_abort_of_one_engine(tmp_path):
    facts = measured("tied", tmp_path)
    assert [row["version"] for row in facts["agreement"]] == [0, 1, 2, 3, 4, 5] and facts["moved"] > 1e-3
    for row in facts["agreement"]:
        agrees(row)
    for row in (facts["corrupt"]["agreement after"], facts["interrupted"]["mended"]):
        agrees(row, 20)
    stale, corrupt, abort = facts["stale"], facts["corrupt"], facts["abort"]
    assert facts["deep"], "the engine's own memory is summed"
    assert stale["trainer ahead"].startswith("StaleEngineError") and stale["asleep"].startswith("StaleEngineError")
    assert stale["after level 1"] == "no error" and stale["version after level 2"] is None
    assert stale["after level 2"].startswith("StaleEngineError: the engine holds no weights")
    assert stale["after a push"] == "no error"
    for case in ("turned bit", "lost tensor"):
        assert corrupt[case].startswith("CorruptWeightsError"), corrupt
    assert corrupt["version"] is None and corrupt["mended"] == "no error"
    awake, asleep, again = facts["sleep_memory"]["taken_mib"]
    cache = facts["sleep_memory"]["kv_bytes"][0] / 2**20
    assert awake - asleep > 0.9 * cache > 100 and abs(again - awake) < 0.1 * cache, facts["sleep_memory"]
    one, two = facts["memory"]["held"]
    assert one[4:] == ["host", "gone"] and two[1:] == [0, 0, None, "gone", "gone"], facts["memory"]
    assert facts["memory"]["same after 1"] and facts["memory"]["same after 2"]
    assert [finish for finish, *_ in abort["cut"]] == ["abort", "abort"] and abort["others"] == [[2, 0], [3, 0]]
    assert not abort["unfinished"] and abort["again"] == "no error"


@pytest.mark.parametrize("scenario", ["untied", "lora"])
def test_stale_prefixes_are_dropped_by_a_push(scenario, tmp_path):
    if scenario == "lora" and not find_spec("peft"):
        pytest.skip("PEFT is not installed")
    facts = measured(scenario, tmp_path)
    assert facts["moved"] > 1e-3
    cache = facts["prefix_cache"]
    for row in [*facts["agreement"], cache["with reset"], cache["with reset again"]]:
        agrees(row)
    assert cache["without reset"]["engine_hf"] > 4 * cache["with reset"]["engine_hf"], cache
