"""A teacher in real vLLM: the likeliest tokens that it tells are those of transformers, and the student comes back."""

import importlib.util

import pytest
from transformers import AutoTokenizer

from spmdrl.hub.resolve import resolve
from tests.ranks.cases import small_model
from tests.ranks.harness import run_ranks
from tests.ranks.test_engine_teachers import SEQUENCES, check_read, read


def test_stale_vllm_reads_as_the_teacher_whose_weights_it_holds(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    # Heads of 32, which vLLM takes.
    shape = {"hidden_size": 128, "intermediate_size": 128}
    student, teacher = (small_model(tmp_path / name, seed, **shape) for seed, name in enumerate(("student", "teacher")))
    AutoTokenizer.from_pretrained(resolve("tiny")).save_pretrained(student)
    more = {
        "model": {"path": student, "dtype": "float32"},
        "distill": {"top_k": 8, "on_engine": True},
        "rollout": {"engine": "vllm", "kv_cache_gib": 0.1, "temperature": 1.0},
    }
    (found,) = run_ranks(read, 1, str(tmp_path / "run"), teacher, more, SEQUENCES, limit=300.0)
    check_read(found, teacher, 1.0, 1e-4)
