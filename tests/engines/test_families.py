"""Ten families that stand for the kinds of models train, export and sample as plain transformers computes them.

tests/long/test_models.py has all families, by vLLM and with adapters too, and writes docs/models.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.families import make
from tests.engines.family_checks import checked

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "llama tied": "tree",
    "gemma2": "tree",
    "phi3 longrope": "tree",
    "deepseek_v3": "tree",
    "gpt_oss": "tree",
    "qwen3_next": "tree",
    "falcon_h1": "tree",
    "lfm2": "tree",
    "zamba2": "tree",
    "bloom": "apart",
}
"""Family -> the form in which its sequences run (`policy/heads.py`)."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Returns what one process found, which runs a model after the other."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("records")
    words = [f"{name.replace(' ', '_')}={make(name, models / name.replace(' ', '_'))}" for name in KINDS]
    command = [sys.executable, "-m", "tests.engines.family_probe", str(out), json.dumps({"engine": "hf"}), *words]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ, capture_output=True, timeout=500)
    return {name: checked(out, name.replace(" ", "_")) for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_parity_a_family_trains_and_samples_as_transformers_computes(facts, name):
    found = facts[name]
    assert not found.error, found
    assert found.form == KINDS[name] and not found.wrong(), found
    # Nothing of it was left out.
    assert None not in (found.trainer, found.engine, found.gradient, found.moved) and found.greedy
