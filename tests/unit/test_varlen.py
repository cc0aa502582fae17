"""Attention kernel of a layer and its arguments; shared prompts and chunks need no mask there."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from spmdrl.policy.attention import varlen
from spmdrl.policy.attention.packed import _hidden
from spmdrl.policy.attention.packing import Packing, _classes
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.policy.attention.varlen import Needs, attend, make_runs, pick
from spmdrl.spmd.copies import to_device
from tests.unit import varlen_kernels
from tests.unit.varlen_kernels import stand_in

BOTH, OWN, NONE = frozenset(varlen.KERNELS), frozenset({"varlen"}), frozenset()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TABLE = [
    # --policy.attention, capability, type, width, soft cap, kernels there -> what computes the layer
    ("auto", 9, BF16, 128, False, BOTH, "flash"),
    ("auto", 8, FP16, 64, False, BOTH, "flash"),
    ("auto", 9, BF16, 128, False, OWN, "varlen"),
    ("auto", 9, BF16, 128, False, frozenset({"flash"}), "flash"),
    ("auto", 9, BF16, 128, False, NONE, "padded"),
    ("auto", 9, FP32, 128, False, BOTH, "padded"),
    ("auto", 9, FP64, 128, False, BOTH, "padded"),
    ("auto", 9, BF16, 256, False, OWN, "varlen"),
    ("auto", 9, BF16, 264, False, BOTH, "padded"),
    ("auto", 9, BF16, 80, True, BOTH, "flash"),
    ("auto", 9, BF16, 80, True, OWN, "padded"),
    ("auto", 7, FP16, 64, False, BOTH, "padded"),
    ("auto", 0, BF16, 64, False, BOTH, "padded"),
    ("varlen", 9, BF16, 128, False, BOTH, "varlen"),
    ("flash", 9, BF16, 128, True, BOTH, "flash"),
    ("padded", 9, BF16, 128, False, BOTH, "padded"),
    ("eager", 9, BF16, 128, False, BOTH, "eager"),
    ("flash", 9, BF16, 128, False, OWN, "flash-attn is not installed"),
    ("varlen", 9, BF16, 128, False, NONE, "lacks that kernel"),
    ("flash", 0, BF16, 128, False, BOTH, "needs an NVIDIA GPU"),
    ("flash", 9, FP32, 128, False, BOTH, "not in float32"),
    ("flash", 9, BF16, 512, False, BOTH, "up to 256 channels, not 512"),
    ("varlen", 9, BF16, 128, True, BOTH, "soft-capped"),
]


@pytest.mark.parametrize(("kind", "capability", "dtype", "width", "softcap", "there", "want"), TABLE)
def test_kernel_of_a_layer(kind, capability, dtype, width, softcap, there, want):
    needs = Needs(capability, dtype, width, softcap)
    if want in (*varlen.KERNELS, "padded", "eager"):
        assert pick(kind, needs, there) == want
    else:
        with pytest.raises(ValueError, match=f"--policy.attention {kind}: .*{want}.*; use --policy.attention auto"):
            pick(kind, needs, there)


def test_needs_are_read_off_the_tensors():
    q, v = torch.zeros(3, 2, 24, dtype=BF16), torch.zeros(3, 2, 16, dtype=BF16)
    assert varlen.needs_of(q, v, 2.0) == Needs(0, BF16, 24, True)
    assert varlen.needs_of(v, q, None) == Needs(0, BF16, 24, False)


@pytest.mark.parametrize("widths", [(16, 16), (12, 20)])
def test_kernel_in_torch_takes_what_it_is_given(widths):
    """The real function takes tensors without memory: arguments and shapes fit, and there is a backward."""
    d, e = widths
    q, k = torch.empty(7, 4, d, device="meta", dtype=BF16), torch.empty(6, 2, d, device="meta", dtype=BF16)
    v = torch.empty(6, 2, e, device="meta", dtype=BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs = to_device(make_runs([4, 3], [[(0, 4)], [(0, 3), (3, 3)]]), q.device)
    assert (runs.longest_q, runs.longest_k, runs.ends_q.dtype) == (4, 6, torch.int32)
    for window in (None, 3):
        out = attend("varlen", q, k, v, runs, 0.3, window)
        assert out.shape == (7, 4, e) and out.dtype == BF16
        out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in leaves)


def test_older_torch_is_not_told_of_grouped_heads(monkeypatch):
    stand_in(monkeypatch)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=rng, dtype=FP64) for heads in (4, 2, 2))
    runs = make_runs([5, 4])
    want = attend("varlen", q, k, v, runs, 0.3)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_kernels.varlen_attn_of_2_11)
    assert torch.equal(attend("varlen", q, k, v, runs, 0.3), want)
    assert varlen_kernels.calls == ["varlen", "varlen of 2.11"]


def test_keys_of_a_branch_are_its_trunk_and_its_own():
    packing = Packing([3, 2, 2, 1, 4], [-1, -1, 0, 0, 1], torch.device("cpu"), "auto", TokenSlice(12))
    runs = packing.runs
    assert runs.ends_q.tolist() == [0, 3, 5, 7, 8, 12] and runs.longest_q == 4
    assert runs.ends_k.tolist() == [0, 3, 5, 10, 14, 20] and runs.longest_k == 6
    assert runs.key_rows is not None
    branches = [0, 1, 2, 5, 6], [0, 1, 2, 7], [3, 4, 8, 9, 10, 11]
    assert runs.key_rows.tolist() == [0, 1, 2, 3, 4, *(row for rows in branches for row in rows)]
    # Nothing grows with the square of a length.
    long = Packing([1000, *[500] * 8], [-1, *[0] * 8], torch.device("cpu"), "auto", TokenSlice(5000)).runs
    assert long.key_rows is not None and len(long.key_rows) == 1000 + 8 * 1500
    alone = Packing([3, 2], [-1, -1], torch.device("cpu"), "auto", TokenSlice(5)).runs
    assert alone.key_rows is None and alone.ends_k is alone.ends_q


def test_trunks_of_one_length_need_no_mask():
    """On a GPU float32 goes through SDPA: its causality from the end equals the mask that a CPU gets."""
    below = [[(0, 5)], [(0, 5)], [(5, 3)], [(5, 1), (6, 2)], [(5, 3)]]
    starts, lengths = [8, 14, 21, 28, 36], [6, 7, 7, 8, 6]
    cuda = _classes(below, starts, lengths, exact=True)
    assert [c.sequences for c in cuda] == [2, 3] and all(c.trunks is None for c in cuda)
    for c in cuda:
        bias = causal_lower_right(c.longest, c.trunk + c.longest)
        assert torch.equal(bias._materialize(), ~_hidden(c, None, torch.device("cpu"))[0, 0])
    (one,) = _classes(below, starts, lengths, exact=False)
    assert one.trunks is not None


@pytest.mark.parametrize("kernel", varlen.KERNELS)
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_layout_chunks_of_context_parallelism_need_no_mask(monkeypatch, cp, window, kernel):
    """Megatron's attention by a kernel equals attention sequence by sequence with masks, in value and gradient."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from spmdrl.policy.megatron import attention

    rng = torch.Generator().manual_seed(cp)
    softcap = 1.5 if kernel == "flash" else None
    lengths = [2 * cp * n for n in (3, 1, 4)]
    whole = [torch.randn(sum(lengths), *shape, generator=rng, dtype=FP64) for shape in ((4, 6), (2, 6), (2, 4))]
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", lambda x, *_: gathered[x.shape[2]])
    for rank in range(cp):
        rows = attention.rows_of(lengths, cp, rank)
        order = torch.cat([attention.rows_of(lengths, cp, r) for r in range(cp)])
        found = []
        for kernels in (False, True):
            q, k, v = leaves = [x.clone().requires_grad_() for x in whole]
            # One process stands in for the ranks of the group: their messages come in their order.
            gathered = {6: k[order], 4: v[order]}
            core: Any = SimpleNamespace(
                cp_group=SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank),
                **{"scale": 0.4, "softcap": softcap, "window": window},
            )
            with monkeypatch.context() as patch:
                if kernels:
                    stand_in(patch, attention)
                    only = frozenset({kernel})
                    patch.setattr(attention, "installed", lambda only=only: only)
                params = SimpleNamespace(lengths=tuple(lengths), runs=None, order=order.argsort())
                out = attention.CoreAttention.forward(core, q[rows], k[rows], v[rows], packed_seq_params=params)
            (out * torch.linspace(-1, 2, out.numel(), dtype=FP64).view_as(out)).sum().backward()
            found.append([out.detach(), *(x.grad for x in leaves)])
        assert varlen_kernels.calls == [kernel]
        # A capped softmax goes through float32 there.
        exact = 1e-12 if softcap is None else 1e-6
        assert found[0][0].shape == (len(rows), 16)
        assert all((a - b).abs().max() < exact for a, b in zip(*found, strict=True))


def test_what_a_model_needs_is_read_off_its_config():
    from transformers import DeepseekV3Config, Gemma2Config, Qwen2Config

    cpu = torch.device("cpu")
    models = [
        (Qwen2Config(hidden_size=64, num_attention_heads=4), Needs(0, BF16, 16, False)),
        (Gemma2Config(head_dim=256), Needs(0, BF16, 256, True)),
        (DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64), Needs(0, BF16, 192, False)),
    ]
    for config, want in models:
        assert varlen.needs_of_model(config, BF16, cpu) == want


@pytest.mark.parametrize("kind", varlen.KERNELS)
def test_kernel_that_cannot_compute_the_model_is_refused_at_the_start(kind):
    from spmdrl.config.schema import Config
    from spmdrl.hub.folder import TINY
    from spmdrl.policy.attention.packed import check_attention

    cfg = Config()
    cfg.model.path, cfg.policy.attention = str(TINY), kind
    with pytest.raises(ValueError, match=f"--policy.attention {kind}: it needs an NVIDIA GPU.*--policy.attention auto"):
        check_attention(cfg, torch.device("cpu"))


def test_flash_attn_that_cannot_be_imported_is_not_taken(monkeypatch, tmp_path, caplog):
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol: of another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with caplog.at_level("WARNING", "spmdrl"):
        assert "flash" not in varlen.installed.__wrapped__()
    assert "flash-attn is installed but cannot be imported: OSError: undefined symbol" in caplog.text


def test_causality_of_branches_is_said_while_a_dispatch_mode_looks_on(monkeypatch):
    """torch cannot make its CausalBias under one, and `--run.lockstep-debug` is one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from spmdrl.policy.attention import packed as attention
    from spmdrl.policy.attention.packing import LengthClass

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    none = torch.zeros(0, dtype=torch.int64)
    group = LengthClass(none, none, none, 1, 3, none, 2)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=FP32)
    with Looks():
        bias = attention._visible(group, on_gpu, None, 0)
    assert torch.equal(bias._materialize(), ~attention._hidden(group, None, torch.device("cpu"))[0, 0])
