"""Arguments with which the vLLM engine is built on a GPU: our own branch, run with a stand-in for vLLM's LLM class."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from benchmarks.pack_vllm import VLLM as PACKED
from spmdrl.config.engines import sleep_level
from spmdrl.engines.vllm.options import build_llm
from tests.contract.lookup import Tree, members, parameters
from tests.contract.sources import UnreachableError, locked, sources
from tests.ranks.cases import config

pytest.importorskip("vllm", reason="vLLM is not installed")
CASES = {
    "plain": {},
    "one process a node of four": {"rollout": {"tp": 4}},
    "whole experts": {"rollout": {"tp": 2, "ep": 2}},
    "copies of the attention": {"rollout": {"tp": 2, "dp": 2, "ep": 4}},
    "8 bits": {"rollout": {"quantization": "fp8"}},
    "awake": {"rollout": {"sleep_level": 0, "kv_cache_gib": 0.5}},
    "adapters": {"lora": {"rank": 4, "push": "adapter"}},
    "routes": {"rollout": {"routing_replay": True}},
}


def options(monkeypatch, **sections) -> dict:
    """Arguments of LLM for a rank on a GPU."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda **given: given)
    cfg = config(model={"path": "tiny"}, **sections)
    return build_llm(cfg, on_cpu=False, routed=cfg.rollout.routing_replay)  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
def test_every_engine_on_a_gpu_takes_the_device_of_its_rank(monkeypatch, name):
    given = options(monkeypatch, **CASES[name])
    # The executor of one process takes the first GPU; this one takes LOCAL_RANK (test below).
    assert given["distributed_executor_backend"] == "external_launcher"
    assert "block_size" not in given


@cache
def taken(version: str) -> set[str]:
    """Arguments of LLM in a wheel."""
    tree = Tree(sources("vllm", version))
    llm, fields = tree.find("vllm.LLM"), tree.find("vllm.engine.arg_utils.EngineArgs")
    assert llm and fields
    takes = parameters(llm)
    assert takes and takes.anything, "what LLM does not name goes to EngineArgs"
    return {*takes.names, *members(fields)}


@pytest.mark.parametrize("version", [locked("gpu.txt")["vllm"], PACKED])
@pytest.mark.parametrize("name", CASES)
def test_wheel_takes_the_arguments_that_it_is_given(monkeypatch, name, version):
    try:
        known = taken(version)
    except UnreachableError as error:
        pytest.skip(str(error))
    assert set(options(monkeypatch, **CASES[name])) <= known


def test_external_launcher_takes_the_local_rank_and_the_other_executor_the_first_device(monkeypatch):
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda")))
    made = {}
    for kind in (ExecutorWithExternalLauncher, UniProcExecutor):
        executor = kind.__new__(kind)
        executor.vllm_config = config
        made[kind] = executor._distributed_args()
    assert made[ExecutorWithExternalLauncher] == ("env://", 11, 3)
    assert made[UniProcExecutor][1:] == (0, 0)


def test_sleep_level_is_the_one_that_copies_nothing_for_nothing():
    adapters = {"lora": {"rank": 4, "push": "adapter"}}
    merged = {"lora": {"rank": 4, "push": "merged"}}
    assert [sleep_level(config(**sections), False) for sections in ({}, merged, adapters)] == [2, 2, 1]
    assert [sleep_level(config(**sections), True) for sections in ({}, adapters)] == [1, 1]
    assert sleep_level(config(rollout={"sleep_level": 0}), False) == 0


def test_refusal_for_memory_names_what_makes_room():
    from spmdrl.engines.vllm.options import advice

    snapshot = SimpleNamespace(total_memory=80 << 30, free_memory=20 << 30, device_=torch.device("cuda"))
    from vllm.v1.worker.utils import request_memory

    with pytest.raises(ValueError) as refused:
        request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.9))  # type: ignore[arg-type]
    said = advice(refused.value)
    assert "--rollout.gpu-memory-utilization" in said and "--policy.offload host" in said
    assert "--rollout.gpu-memory-utilization" not in advice(ValueError("no such architecture"))


@pytest.mark.parametrize(
    ("push", "level", "warns"), [("adapter", 2, True), ("adapter", 1, False), ("merged", 2, False)]
)
def test_deep_sleep_beside_adapters_says_what_it_costs(monkeypatch, push, level, warns):
    from spmdrl.policy.models import Models
    from spmdrl.session import engine as module
    from spmdrl.session.session import Session
    from spmdrl.tracking.metrics import Timer

    said, slept = [], []
    engine = SimpleNamespace(bytes_by_owner=lambda: {"engine weights": 3 << 30}, sleep=slept.append)
    monkeypatch.setattr(module, "build_engine", lambda *args: engine)
    monkeypatch.setattr(module, "room_for_engine", lambda *args: nullcontext())
    cfg = config(lora={"rank": 4, "push": push}, rollout={"sleep_level": level})
    session = Session(cfg, SimpleNamespace(device=torch.device("cuda")), Timer())  # type: ignore[arg-type]
    session.warn = said.append
    models = Models(object())  # type: ignore[arg-type]
    assert module.sleeping_engine(session, models, set()) is engine and slept == [level]
    assert [("3.00 GiB" in text and "1 keeps them in host memory" in text) for text in said] == [True] * warns


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("factor"), "KeyError: 'factor'"),
        (AttributeError("'AfmoeConfig' object has no attribute 'x'"), "AttributeError: 'AfmoeConfig' object has"),
        (ValueError("1 validation error\n  Value error, not supported."), "1 validation error Value error, not"),
        (RuntimeError("x" * 1000), "x" * 400),
    ],
)
def test_the_reason_of_vllm_is_one_line_with_the_type_of_what_is_no_sentence(error, text):
    from spmdrl.engines.vllm.options import reason

    assert reason(error).startswith(text) and "\n" not in reason(error) and len(reason(error)) <= 400
