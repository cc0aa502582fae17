"""The paper engine against real ones: the boxes that each rank reads, and the bytes of its weights and KV cache.

The measuring is done in `paper_probe.py`, one process a rank, all forked from one that has imported the engines. Under
dp the probe's world is that of one engine, and under ep the experts of a layer lie whole on one rank.
"""

import json
from collections import defaultdict
from dataclasses import fields

import pytest

from spmdrl.config.schema import RolloutConfig
from tests.builds import no_sglang, no_vllm
from tests.e2e.runner import run

pytestmark = pytest.mark.timeout(300)
LACKING = {"vllm": no_vllm(), "sglang": no_sglang(), "hf": ""}
"""Engine -> reason why it cannot run here; empty where it can."""
KNOWN = {field.name for field in fields(RolloutConfig)}
CASES = [
    *("vllm:qwen2:tp1", "vllm:qwen2:tp2", "vllm:llama:tp2", "vllm:qwen3_moe:tp2"),
    *("vllm:deepseek_v3:tp1", "vllm:deepseek_v3:tp2", "vllm:qwen2:tp2-lora6"),
    "vllm:qwen2_5_vl:tp2",
    *("sglang:qwen3_moe:tp2", "hf:qwen2:tp2", "hf:llama:tp1-lora6", "hf:deepseek_v3:tp1"),
]
if "ep" in KNOWN:
    CASES += ["vllm:qwen3_moe:tp2-ep2", "vllm:deepseek_v3:tp2-dp2-ep4", "sglang:qwen3_moe:dp2-ep2"]
RUNNABLE = [case for case in CASES if not LACKING[case.split(":")[0]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, list[dict]]:
    """Facts of every rank by case."""
    root = tmp_path_factory.mktemp("facts")
    ended = run([root, *RUNNABLE], 280, module="tests.engines.paper_probe")
    assert ended.rc == 0, ended.show()
    out = defaultdict(list)
    for file in sorted(root.glob("*.json")):
        facts = json.loads(file.read_text())
        assert "failed" not in facts, f"{file.stem}: {facts['failed']}\n{ended.show()}"
        out[file.stem.rpartition(":")[0]].append(facts)
    return out


def case_of(name: str):
    why = LACKING[name.split(":")[0]]
    return pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why))


@pytest.mark.parametrize("case", [case_of(name) for name in CASES])
def test_paper_engine_reads_and_holds_what_the_real_one_does(measured, case):
    """Region for region, and byte for byte."""
    assert measured[case], "the case left no facts"
    for facts in measured[case]:
        real, paper = facts["real"], facts["paper"]
        assert facts["unknown"] == [] and facts["lack"] == 0
        assert paper["capacity"] == real["capacity"]
        assert {n: b for n, b in paper["boxes"].items() if b != real["boxes"][n]} == {}
        assert sum(map(len, real["boxes"].values())) >= 20 and real["bytes"]["engine weights"] > 100_000
        assert paper["bytes"] == real["bytes"]
        if "packed" in facts:
            added, planned = facts["packed"]
            assert added == planned > 0, "copies of linear layers that vLLM's CPU build makes when it first samples"


def test_ranks_of_the_cases_differ(measured):
    """The comparison could fail: ranks of one engine read other boxes, and layouts other sizes."""
    if LACKING["vllm"]:
        pytest.skip(LACKING["vllm"])
    one, other = (facts["real"]["boxes"] for facts in measured["vllm:deepseek_v3:tp2"])
    assert sum(one[name] != other[name] for name in one) > 30
    whole, half = (measured[f"vllm:qwen2:tp{n}"][0]["real"]["bytes"] for n in (1, 2))
    assert whole["KV cache"] == 2 * half["KV cache"] and whole["engine weights"] > 1.9 * half["engine weights"]
