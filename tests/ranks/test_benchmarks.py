"""Benchmarks that compare with a formula: the formula itself, and that the scripts run."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

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
    out, kinds = tmp_path / "mfu.json", ("even", "ragged")
    sides = {"fsdp", "plain", "layers", "once", "whole"} | ({"megatron"} if find_spec("megatron") else set())
    sizes = ["--tokens", "512", "--length", "128", "--tokens-per-microbatch", "256"]
    command = [sys.executable, "benchmarks/mfu.py", "--quick", *sizes, "--json", str(out), "--only", *sides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert {(row["kind"], row["side"]) for row in rows} == {(k, s) for k in kinds for s in sides}
    assert all(row["mfu"] > 0 for row in rows)
    assert "target mfu_fsdp_over_plain_even" in done.stdout


def test_share_of_time_in_which_a_device_works():
    from benchmarks._trace import covered, work_of

    def event(cat, name, ts, dur, ph="X"):
        return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur}

    trace = [
        event("kernel", "nvjet_tst_128x256", 100.0, 50.0),
        event("kernel", "flash_fwd_kernel", 120.0, 10.0),  # inside the product, on another stream
        event("kernel", "vectorized_elementwise_kernel", 145.0, 15.0),  # overlaps its end by 5
        event("gpu_memcpy", "Memcpy HtoD", 400.0, 20.0),
        event("cuda_runtime", "cudaLaunchKernel", 160.0, 240.0),  # the host's time is not the device's
        event("kernel", "an instant", 170.0, 99.0, ph="i"),
        event("gpu_memset", "Memset", 410.0, 30.0),
    ]
    found = work_of({"traceEvents": trace})
    assert found["device_s"] == pytest.approx(100e-6) and found["launches"] == 5
    expected = {"product": 50e-6, "attention": 10e-6, "other": 15e-6, "copy": 50e-6}
    assert found["kinds"] == pytest.approx(expected)
    assert covered([]) == 0


def test_mfu_keeps_the_figures_of_the_others_if_a_side_fails():
    from benchmarks._mfu_rounds import measure
    from benchmarks.mfu import complete

    def side(loss, fails_at=99):
        calls = []

        def step():
            calls.append(0)
            if len(calls) >= fails_at:
                raise RuntimeError("no kernel image")
            return loss

        return SimpleNamespace(prepare=lambda tokens: step)

    saved, cpu, config = [], torch.device("cpu"), SimpleNamespace(hidden_size=8, num_attention_heads=2, vocab_size=9)
    config.num_key_value_heads, config.intermediate_size, config.num_hidden_layers = 2, 8, 1

    def keep(found):
        complete(found, "even", [2], [], config, (1e12, None))
        saved.append([{**row} for row in found])

    sides = {
        "a": side(1.0),
        "b": side(1.0, 1),
        "c": side(1.0, 3),
        "d": side(1.1),
        "e": side(math.nan),
        "f": "no",
        "g": None,
    }
    rows = measure(sides, [torch.tensor([1, 2])], 2, cpu, [1.0], keep)
    errors = {row["side"]: row.get("error", "") for row in rows}
    assert errors.pop("a") == "" and set(errors) == {*"bcdef"} and all(errors.values())
    assert "no kernel image" in errors["c"] and "its loss is 1.1" in errors["d"] and errors["f"] == "no"
    assert len(saved) == 3 and rows[0]["mfu"] > 0 and "mfu" not in rows[2] and "seconds" in saved[1][2]
