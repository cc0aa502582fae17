"""No rank ever holds a whole model: the memory of a start and of a save, and the values that every layout reads."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.load import MIB, SHAPES, Peak, loaded, make_folder, settings
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.weights import safetensors
from tests.ranks.cases import config, full_weights, small_model
from tests.ranks.harness import run_ranks
from tests.unit.test_empty_models import folder_of, quantized

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells anonymous memory")
BEYOND = 128
"""MiB beyond a rank's share; whole, the model below takes 253 in bfloat16 and 506 in float32."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """135M parameters: what a rank needs besides its share is small beside the whole model."""
    assert SHAPES["135M"][0] == 576
    return make_folder(tmp_path_factory.mktemp("135M") / "model", "135M")


@needs_proc
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_while_it_loads(large, ranks):
    for kind, whole in (("trained", 513), ("frozen", 257), ("critic", 513), ("adapters", 279)):
        for found in run_ranks(loaded, ranks, large, kind):
            share, peak = found["share"] / MIB, found["peak"] / MIB
            assert abs(share - whole / ranks) < 0.03 * share, (kind, share)
            assert share < peak < share + BEYOND, (kind, share, peak)


@needs_proc
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("axes", ["tp", "pp"])
def test_a_stage_of_megatron_holds_its_share_while_it_loads(large, axes):
    for found in run_ranks(loaded, 2, large, f"megatron {axes}", parallel={axes: 2}):
        share, peak = found["share"] / MIB, found["peak"] / MIB
        assert share < peak < share + BEYOND, (share, peak)


def save(world, folder, target):
    safetensors.BUCKET = 4 * MIB
    policy = FsdpPolicy(settings(folder, "frozen"), world, 0, trainable=False)
    os.makedirs(target, exist_ok=True)
    with Peak() as peak:
        policy.save(Path(target))
    return peak.bytes / MIB


@needs_proc
def test_a_save_goes_through_rank_0_in_pieces(large, tmp_path):
    first, second = run_ranks(save, 2, large, str(tmp_path / "saved"))
    assert first < BEYOND and second < BEYOND, (first, second)
    size = sum(file.stat().st_size for file in (tmp_path / "saved" / "model").glob("*.safetensors"))
    assert size > 250 * MIB, "the whole model"


# ── values ───────────────────────────────────────────────────────────────────


def read(world, folder, head):
    policy = FsdpPolicy(config(model={"path": folder}), world, 100, head=head)
    return full_weights(policy), {name: b.clone() for name, b in policy.model.hf.named_buffers()}


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_layout_every_rank_reads_what_transformers_loads(tmp_path_factory, ranks, replicate):
    """Shards that are uneven and empty, two copies, tied weights, packed experts, a critic without a head."""
    root = tmp_path_factory.mktemp("folders")
    cases = [(small_model(root / "small"), "lm"), (str(root / "small"), "value")]
    cases += [(str(folder_of(family, root / family)), "lm") for family in ("qwen3_moe", "deepseek_v3")]
    for folder, head in cases:
        want = build_model(Path(folder), torch.float32, head=head)
        buffers = dict(want.named_buffers())
        for weights, held in run_ranks(read, ranks, folder, head, dp_replicate=replicate):
            assert weights.keys() == dict(want.named_parameters()).keys()
            assert all(torch.equal(weights[name], p) for name, p in want.named_parameters()), folder
            assert held.keys() == buffers.keys() and all(torch.equal(held[name], b) for name, b in buffers.items())


def read_by_megatron(world, folder, target):
    from spmdrl.policy.megatron.policy import MegatronPolicy

    cfg = config(model={"path": folder}, policy={"backend": "megatron", "mtp": "keep"}, parallel={"tp": 2})
    policy = MegatronPolicy(cfg, world, 0, trainable=False)
    # As a policy that trains does.
    policy.untrained = safetensors.prediction_heads(policy.folder, policy.hf_config)
    pieces = {(p.name, p.box): p.tensor.clone() for p in policy.pieces()}
    if target:
        os.makedirs(target, exist_ok=True)
        policy.save(Path(target))
    return pieces


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_layout_megatron_reads_fp8_folders_and_saves_plain_ones(tmp_path):
    """The boxes of tensor parallelism cut through blocks; a head for further tokens is dequantised as it is copied."""
    source = folder_of("deepseek_v3", tmp_path / "source", torch.float32, topk_group=1)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, source)
    tensors = load_file(source / "model.safetensors")
    head = {
        name.replace(".2.", ".3."): x.flip(0)
        for name, x in tensors.items()
        if name.startswith("model.layers.2.self_attn.")
    }
    save_file(tensors | head, source / "model.safetensors", {"format": "pt"})
    plain = quantized(source, tmp_path / "fp8")
    shutil.copytree(source, tmp_path / "copy")
    save_file(plain, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "fp8")
    saved = tmp_path / "saved"
    ours = run_ranks(read_by_megatron, 2, str(tmp_path / "fp8"), str(saved), parallel={"tp": 2})
    theirs = run_ranks(read_by_megatron, 2, str(tmp_path / "copy"), "", parallel={"tp": 2})
    for got, want in zip(ours, theirs, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], x) for key, x in want.items())
    written = load_file(saved / "model" / "model.safetensors")
    assert written.keys() == plain.keys() and "model.layers.3.self_attn.o_proj.weight" in written
    assert all(torch.equal(x, plain[name]) for name, x in written.items())
    assert "quantization_config" not in json.loads((saved / "model" / "config.json").read_text())
