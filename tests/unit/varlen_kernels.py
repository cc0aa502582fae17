"""Attention kernels of a GPU in plain torch, for machines without one: they stand in for what cannot run on a CPU.

What is true of the kernels themselves (their numbers, that they run) they cannot show. They hold to what the sources of
flash-attn 2.8 and of torch 2.11 to 2.13 say: arguments, causality aligned to the end, windows that count the keys
before a query's own, one width of heads, a multiple of 8. Unlike the kernels they compute in any type.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.varlen import KERNELS, WIDEST, Needs

calls: list[str] = []
"""Names of the kernels that computed, one per call."""


def reference(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, window, softcap=0.0):
    """Computes one sequence and one head after another, over the keys that each query sees."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= WIDEST and q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[1] % k.shape[1] == 0
    assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k)
    assert int(ends_q[-1]) == len(q) and int(ends_k[-1]) == len(k) == len(v)
    left, right = window
    assert right == 0
    out, group = [], q.shape[1] // k.shape[1]
    for a, b, c, d in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        assert b - a <= longest_q and d - c <= longest_k
        keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(b - a)[:, None] + int((d - c) - (b - a))
        place = torch.arange(int(d - c))[None]
        seen = (place <= last) & ((place >= last - left) if left >= 0 else torch.tensor(True))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
    return torch.cat(out)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Computes as torch 2.13 does, which has to be told of grouped heads."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    calls.append("varlen")
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def varlen_attn_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """Computes as torch 2.11 does, which is not told."""
    calls.append("varlen of 2.11")
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    """Computes as flash-attn 2.8 does."""
    assert causal
    calls.append("flash")
    return reference(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size, softcap
    )


def on_gpu(q, v, softcap) -> Needs:
    """Needs of a layer as if it computed in bfloat16 on a GPU."""
    return Needs(9, torch.bfloat16, max(q.shape[-1], v.shape[-1]), bool(softcap))


def stand_in(patch: pytest.MonkeyPatch, *modules) -> None:
    """Puts them in the place of the kernels; modules: those that choose a kernel, in place of `policy.attention`."""
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    patch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    for module in modules or (attention,):
        patch.setattr(module, "installed", lambda: frozenset(KERNELS))
        patch.setattr(module, "needs_of", on_gpu)
    calls.clear()
