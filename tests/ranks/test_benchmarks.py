"""Benchmarks that compare with a formula: the formula itself, and that the scripts run."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "tp2": ("dense", {"tp": 2}),
    "tp2 alone": ("dense", {"tp": 2, "sequence_parallel": False}),
    "cp2": ("dense", {"cp": 2}),
    "pp2": ("dense", {"pp": 2}),
    "dp2": ("dense", {}),
    "ep2": ("mixture", {"ep": 2}),
}


def sends(world, cases: dict) -> dict:
    """Returns layout -> bytes that this rank sends in one update."""
    from benchmarks.megatron import bytes_of

    return {name: bytes_of(model, axes) for name, (model, axes) in cases.items()}


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Returns layout -> (measured, formula) by axis, mean over two ranks."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from benchmarks._axis_bytes import AXES
    from benchmarks.megatron import make_model

    root = tmp_path_factory.mktemp("models")
    models = {kind: make_model(root / kind, "tiny", kind == "mixture") for kind in ("dense", "mixture")}
    ranks = run_ranks(sends, 2, {name: (models[kind], axes) for name, (kind, axes) in LAYOUTS.items()})
    return {
        name: [{axis: sum(r[name][key][axis] for r in ranks) / 2 for axis in AXES} for key in ("sent", "formula")]
        for name in LAYOUTS
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_every_axis(layout, sent):
    measured, formula = sent[layout]
    print(layout, measured, formula)
    axis = layout[:2]
    assert measured[axis] > 1e5
    for name, value in formula.items():
        # Buffers are padded; a random router does not choose quite evenly.
        assert abs(measured[name] - value) <= (0.1 if name == "ep" else 0.005) * value, name


def test_flops_of_the_formula():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.mfu import flops

    sizes = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, vocab_size=96)
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    model, length = Qwen2ForCausalLM(config), 40
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None]).logits.sum().backward()
    # Counted is all of attention, of which the formula has the causal half; and no gradient of the embedded tokens'
    # own, which are looked up.
    half = 12 * 3 * 48 * length**2 / 2
    assert flops(config, [length]) + half == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert flops(config, [length] * 2) == 2 * flops(config, [length])


def test_mfu_runs(tmp_path):
    out = tmp_path / "mfu.json"
    command = [sys.executable, "benchmarks/mfu.py", "--quick", "--tokens", "512", "--length", "128", "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    sides = {"fsdp", "plain"} | ({"megatron"} if find_spec("megatron") else set())
    assert {(row["kind"], row["side"]) for row in rows} == {(k, s) for k in ("even", "ragged") for s in sides}
    assert all(row["mfu"] > 0 for row in rows)
    assert "target mfu_fsdp_over_plain_even" in done.stdout
