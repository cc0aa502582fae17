"""Replaces GPU kernels (Triton, flash-attn) with functions that allocate the same memory and count FLOPs."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from spmdrl.plan.numbers import META
from spmdrl.plan.paper import Paper

aten = torch.ops.aten
COUNTED: list[Paper] = []
"""The `Paper` that counts the FLOPs of the substitutes. There is only one per process."""


class Rows:
    """Replaces the in-place row operations of `TritonRows`, which allocate nothing."""

    def borrow(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Replaces `TritonRows.borrow`; returns the logits themselves rather than a copy."""
        return logits_CV

    def add_stats_(self, logits_CV, state_4C, *args: Any) -> None:
        """Replaces `TritonRows.add_stats_`; marks the updated state as unknown."""
        COUNTED[0].numbers.forget(state_4C)

    def add_rounded_(self, exact_CV, state_4C, kept_CV, kept_4C, *args: Any) -> None:
        """Replaces `TritonRows.add_rounded_`; marks the updated tensors as unknown."""
        for changed in (state_4C, kept_CV, kept_4C):
            COUNTED[0].numbers.forget(changed)

    def results(self, state_4C, targets_C, vocab: int, entropy: bool) -> tuple[torch.Tensor, ...]:
        """Replaces `TritonRows.results`."""
        logp_C, entropy_C, norm_2C = state_4C[0].clone(), state_4C[1].clone() if entropy else None, state_4C[:2].clone()
        return logp_C, entropy_C, norm_2C  # type: ignore[return-value]

    def logit_gradient(self, logits_CV, *args: Any, out_CV: torch.Tensor | None = None) -> torch.Tensor:
        """Replaces `TritonRows.logit_gradient`; returns the tensor that receives the gradient."""
        return logits_CV if out_CV is None else out_CV


def _tagged(paper: Paper, tag: str, function: Callable) -> Callable:
    @wraps(function)
    def run(*args, **kwargs):
        with paper.tagged(tag):
            return function(*args, **kwargs)

    return run


def install(paper: Paper, kind: str) -> None:
    """Install the substitute kernels. kind: `cuda` or `cpu`, the device type that the meta device stands in for."""
    COUNTED[:] = [paper]
    from spmdrl_kernels import blocks, chunked, distill, host, linear

    for part in (linear._LinearLogprob, chunked._ChunkedLoss, distill._Distillation):
        for name in ("forward", "backward"):
            setattr(part, name, staticmethod(_tagged(paper, "logits", getattr(part, name))))
    for module in (linear, chunked):
        module.check_values = lambda *args, **more: None  # type: ignore[attr-defined]
    # This check compares values, which meta tensors do not have.
    chunked._Caller.check_separable = lambda *args: None  # type: ignore[method-assign]
    if kind == "cpu":
        blocks.place_of = distill.place_of = lambda device: "cpu"
        _as_host()
        return
    host.AVAILABLE = False
    # On a GPU, cuBLAS multiplies bfloat16 matrices into a float32 output, so no float32 copies are made.
    blocks.widens = blocks.narrow
    blocks.product_ = _product
    for module in (linear, chunked):
        module.row_operations = lambda *args: Rows()  # type: ignore[attr-defined]
    _attention()
    _fused_attention()


def _fused_attention() -> None:
    """Make torch's attention on the meta device allocate what its fused kernels for GPUs do.

    Only attention without a mask, as in vision towers, is replaced.
    """
    functional: Any = torch.nn.functional
    own = functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if q.device != META or attn_mask is not None or q.shape[-1] != v.shape[-1] or enable_gqa:
            return own(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if q.dtype.itemsize == 2:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, gradient, dropout_p, is_causal, scale=scale)[
            0
        ]

    functional.scaled_dot_product_attention = attention


def _as_host() -> None:
    """Make the meta device look like a CPU to torch's attention and to code that checks a tensor's device."""
    torch.Tensor.is_cpu = property(lambda x: x.device.type in ("cpu", "meta"))  # type: ignore
    functional: Any = torch.nn.functional
    own = functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if q.shape[-1] != v.shape[-1] or q.device != META:
            return own(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    functional.scaled_dot_product_attention = attention


def _product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Count the FLOPs of a matmul that cuBLAS writes into `total` without an intermediate buffer."""
    COUNTED[0].flops += 2 * a.numel() * b.shape[1]


def _attention() -> None:
    from spmdrl.policy.attention import packed, varlen
    from spmdrl.policy.megatron import attention as of_megatron

    varlen._capability = lambda device: 9
    for module in (packed, of_megatron):
        module.installed = lambda: frozenset(("flash",))  # type: ignore[attr-defined]
    packed.attend = attend  # type: ignore[attr-defined]
    of_megatron.attend_runs = attend  # type: ignore[attr-defined]


def attend(kernel, q_QHd, k_NKd, v_NKe, runs, scale, window=None, softcap=None) -> torch.Tensor:
    """Replaces `varlen.attend`; allocates as much memory as flash-attn does and counts its FLOPs."""
    if runs.key_rows is not None:
        k_NKd, v_NKe = k_NKd.index_select(0, runs.key_rows), v_NKe.index_select(0, runs.key_rows)
    return _Attention.apply(q_QHd, k_NKd, v_NKe, runs)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Replaces flash-attn; saves inputs, output and one float32 per query and head for the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, runs):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        ctx.flops = _add_flops(q, k, v, runs, 1.0)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _ = ctx.saved_tensors
        _add_flops(q, k, v, ctx.runs, 2.5)
        # flash-attn accumulates the query gradient in a float32 buffer.
        summed = q.new_empty(q.shape, dtype=torch.float32)
        del summed
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _add_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Any, times: float) -> int:
    """Count and return the FLOPs of causal attention: forward-pass FLOPs multiplied by `times`.

    The forward pass has two matrix products over all (query, key) pairs whose key is not later than the query.
    """
    ends_q, ends_k = COUNTED[0].numbers.value_of(runs.ends_q), COUNTED[0].numbers.value_of(runs.ends_k)
    if ends_q is None or ends_k is None:
        return 0
    queries, keys = ends_q.diff().double(), ends_k.diff().double()
    # In each sequence, the last query attends to all keys and the first to (keys - queries + 1) of them.
    pairs = float((queries * (keys - (queries - 1) / 2)).sum())
    flops = int(2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2]) * times)
    COUNTED[0].flops += flops
    return flops
