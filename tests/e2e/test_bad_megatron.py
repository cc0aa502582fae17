"""Requests that `--policy.backend megatron` refuses: one message for two ranks, as in `test_bad_input.py`."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from spmdrl.policy.megatron.families import FAMILIES
from tests.e2e.runner import ROOT
from tests.e2e.test_bad_input import QUICK, START, TINY, refused
from tests.e2e.warm import run

pytestmark = pytest.mark.timeout(240)
MEGATRON = [*QUICK, "--policy.backend", "megatron"]
needs_megatron = pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
HIDDEN = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec


@staticmethod
def without(name, *rest):
    return None if name.split(".")[0] == "megatron" else find(name, *rest)


PathFinder.find_spec = without
"""


def test_bad_machine_without_megatron_core(tmp_path):
    """The same message names everything else that flags alone show to be wrong."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    paths = ":".join(map(str, (tmp_path, ROOT)))
    flags = [*MEGATRON, "--parallel.tp", "3", "--parallel.ep", "3", "--parallel.sp", "2"]
    ended = run([*flags, "--run.dir", tmp_path / "run"], 2 * START, ranks=2, env={"PYTHONPATH": paths})
    refused(
        ended,
        'megatron-core is not installed: ./launch/install.sh, or pip install "megatron-core>=0.16.1',
        "--parallel.sp 2: needs --policy.backend fsdp; in megatron --parallel.cp divides",
        "--parallel.ep 3: pp x etp x ep = 3 must divide 2 ranks",
    )
    assert not (tmp_path / "run").exists()


@needs_megatron
def test_bad_layout_that_does_not_divide_the_model(tmp_path):
    ended = run([*MEGATRON, "--parallel.pp", "2", "--run.dir", tmp_path / "run"], 2 * START, ranks=2)
    refused(ended, "--parallel.pp 2: the model has 3 layers", "may be 1, 3", "--parallel.last-stage-layers")


@needs_megatron
def test_bad_architecture_without_converter(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=47, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    for file in Path(TINY).glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    flags = [*MEGATRON, "--parallel.tp", "2", "--model.path", tmp_path / "model"]
    words = ["no converter for gpt2", ", ".join(FAMILIES), "docs/megatron.md"]
    ended = run([*flags, "--run.dir", tmp_path / "run"], 2 * START, ranks=2)
    refused(ended, *words, "--policy.backend fsdp trains any model of transformers")
