"""A frozen judge in real vLLM and SGLang: whose weights sample when, by their logp."""

import importlib.util

import pytest

from spmdrl.config.engines import sglang_python
from tests.ranks.harness import run_ranks
from tests.ranks.test_engine_judges import judged, model, sampled, settings

SHAPE = {"hidden_size": 128, "intermediate_size": 128}
"""Heads of 32, which vLLM takes."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_stale_an_engine_samples_verdicts_by_the_judge_and_responses_by_the_policy(engine, tmp_path):
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if engine == "sglang" and sglang_python() is None:
        pytest.skip("SGLang is not installed")
    policy, judge = model(tmp_path / "policy", 0, **SHAPE), model(tmp_path / "judge", 1, **SHAPE)
    file = judged(tmp_path, engine=judge, max_new_tokens=12, temperature=1.0)
    sections = settings(
        *(tmp_path, policy),
        model={"dtype": "float32"},
        rollout={"engine": engine, "kv_cache_gib": 0.1},
        reward={"function": file, "max_ungraded": 1.0},
    )
    (found,) = run_ranks(sampled, 1, str(tmp_path / "run"), sections, policy, judge, limit=300.0)
    assert found["versions"] == [0, -2, 0, -2]
    assert found["policy"] < 1e-3 and found["judge"] < 1e-3 and found["other"] > 0.1
    assert found["counts"] == (20, 40) and found["held"] == (-2, 0)
    assert found["spent"]["bad_verdicts"] == 40 and all(found["left out"])
