"""The row operations as two Triton kernels; `reference.py` has the same operations in plain torch.

A block of logits [C, V] is stored row after row in the matmul's dtype. Both kernels read each logit once and compute in
fp32 (fp64 for fp64 logits). The code is not specific to CUDA: it uses no inline assembly, vendor library or warp
specialization, and its only functions of `tl` on numbers are exp, max and sum. It is not autotuned, because a kernel
that works in place must not run several times on the same data. Offsets are int64, because rows * columns may exceed
2^31.
"""

import os
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from spmdrl_kernels.vocabulary import SECOND

SECONDS: dict[str, Any] = {"": 0, "entropy": 1, "collision": 2}
GRADIENT_BLOCK = 2048
"""Maximum number of columns that one program of the gradient kernel processes."""
STATS_LANES, STATS_STEPS, STATS_WARPS = 1024, 2, 4
STATS_LANES_FP64, STATS_STEPS_FP64 = 256, 2
"""A program of the stats kernel processes up to LANES * STEPS columns at a time; one thread has all steps of a lane.

STATS_WARPS is the number of warps of a program."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _distribution_logits(raw, scale, SOFTCAP: tl.constexpr):
    """Return y = softcap * tanh(raw / softcap) * scale, and the tanh. Without a softcap y is raw * scale.

    tanh(x) = sign(x) (1 - e^(-2|x|)) / (1 + e^(-2|x|)): the exponent is never positive, so nothing overflows.
    """
    tanh = raw
    y = raw
    if SOFTCAP is not None:
        x = raw / SOFTCAP
        decay = tl.exp(-2 * tl.abs(x))
        size = (1 - decay) / (1 + decay)
        tanh = tl.where(x < 0, -size, size)
        y = tanh * SOFTCAP
    return y * scale, tanh


@triton.jit
def _fold(y, tops, totals, seconds, SECOND: tl.constexpr):
    """Return the state of each lane (its maximum m, and sums relative to m), updated by columns y [steps, lanes].

    If the maximum rises from m to m', with a = e^(m - m'):
        sum    <- a sum + sum e^(y - m')
        second <- a (second + (m - m') sum) + sum e^(y - m') (y - m')          for the entropy
        second <- a^2 second + sum e^(2 (y - m'))                              for the collision probability
    """
    risen = tl.maximum(tops, tl.max(y, axis=0))
    gap = tops - risen
    a = tl.exp(gap)
    shifted = y - risen[None, :]
    e = tl.exp(shifted)
    if SECOND == 1:
        # Where y is -inf, e is 0; the lower bound on `shifted` avoids the product 0 * -inf, which is nan.
        seconds = a * (seconds + gap * totals) + tl.sum(e * tl.maximum(shifted, -1e30), axis=0)
    if SECOND == 2:
        seconds = a * a * seconds + tl.sum(e * e, axis=0)
    return risen, a * totals + tl.sum(e, axis=0), seconds


@triton.jit
def _join(state, state_stride, row, tops, totals, seconds, SECOND: tl.constexpr):
    """Merge the lanes' states into the row's state in memory, which so far describes the columns of earlier blocks."""
    top = tl.load(state + row)
    total = tl.load(state + state_stride + row)
    second = tl.load(state + 2 * state_stride + row)
    best = tl.maximum(top, tl.max(tops, axis=0))
    gap = top - best
    gaps = tops - best
    a = tl.exp(gap)
    each = tl.exp(gaps)
    if SECOND == 1:
        second = a * (second + gap * total) + tl.sum(each * (seconds + gaps * totals), axis=0)
    if SECOND == 2:
        second = a * a * second + tl.sum(each * each * seconds, axis=0)
    tl.store(state + row, best)
    tl.store(state + state_stride + row, a * total + tl.sum(each * totals, axis=0))
    tl.store(state + 2 * state_stride + row, second)


@triton.jit
def _stats_kernel(
    logits,
    row_stride,
    columns,
    targets,
    scales,
    state,
    state_stride,
    kept,
    kept_stride,
    kept_state,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FP64: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Update a row's state (max, sum, second, target; see `vocabulary.py`) by its columns; one program for each row.

    Each lane has a separate state, so that threads communicate only once per row. When threads communicated at every
    step, this took half of the time. Lanes start at the maximum of earlier columns, which `new_state` initializes to a
    very low number, not to -inf, because -inf - (-inf) is nan.

    If `kept` is given, the kernel also rounds the logits into it and updates `kept_state` by the rounded logits.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype = tl.float64 if FP64 else tl.float32
    lanes = tl.arange(0, LANES)
    steps = tl.arange(0, STEPS)
    top = tl.load(state + row)
    scale = top * 0 + 1
    if scales is not None:
        scale = tl.load(scales + row)
    tops = tl.zeros([LANES], dtype) + top
    totals = tl.zeros([LANES], dtype)
    seconds = tl.zeros([LANES], dtype)
    if kept is not None:
        kept_tops = tl.zeros([LANES], dtype) + tl.load(kept_state + row)
        kept_totals = tl.zeros([LANES], dtype)
        kept_seconds = tl.zeros([LANES], dtype)
    target = tl.load(targets + row)
    row_logits = logits + row * row_stride
    for start in range(0, columns, STEPS * LANES):
        at = start + steps[:, None] * LANES + lanes[None, :]
        inside = at < columns
        raw = tl.load(row_logits + at, mask=inside, other=0.0)
        y, _ = _distribution_logits(raw.to(dtype), scale, SOFTCAP)
        y = tl.where(inside, y, float("-inf"))
        tops, totals, seconds = _fold(y, tops, totals, seconds, SECOND)
        if kept is not None:
            rounded = raw.to(kept.dtype.element_ty)
            tl.store(kept + row * kept_stride + at, rounded, mask=inside)
            y, _ = _distribution_logits(rounded.to(dtype), scale, SOFTCAP)
            y = tl.where(inside, y, float("-inf"))
            kept_tops, kept_totals, kept_seconds = _fold(y, kept_tops, kept_totals, kept_seconds, SECOND)
    _join(state, state_stride, row, tops, totals, seconds, SECOND)
    if kept is not None:
        _join(kept_state, state_stride, row, kept_tops, kept_totals, kept_seconds, SECOND)
    if (target >= 0) & (target < columns):
        raw = tl.load(row_logits + target)
        y, _ = _distribution_logits(raw.to(dtype), scale, SOFTCAP)
        tl.store(state + 3 * state_stride + row, y)


@triton.jit
def _gradient_kernel(
    logits,
    row_stride,
    out,
    out_stride,
    columns,
    targets,
    scales,
    tops,
    shares,
    entropies,
    grad_logps,
    grad_entropies,
    SOFTCAP: tl.constexpr,
    FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of BLOCK columns of a row into out, which may be the logits; one program for each block.

    z = y - max; p = share e^z; dy = g (onehot - p) - e p (z + H'), where H' is the entropy plus log share; the gradient
    with respect to the raw logits is dy * scale * (1 - tanh^2). Only one program reads and writes an element, so out
    may be the logits themselves.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(tops + row)
    scale = top * 0 + 1
    if scales is not None:
        scale = tl.load(scales + row)
    raw = tl.load(logits + row * row_stride + at, mask=at < columns, other=0.0)
    raw = raw.to(tl.float64) if FP64 else raw.to(tl.float32)
    y, tanh = _distribution_logits(raw, scale, SOFTCAP)
    z = y - top
    p = tl.exp(z) * tl.load(shares + row)
    onehot = tl.where(at == tl.load(targets + row), 1.0, 0.0)
    d = tl.load(grad_logps + row) * (onehot - p)
    if grad_entropies is not None:
        surprise = tl.where(z > float("-inf"), z + tl.load(entropies + row), 0.0)
        d -= tl.load(grad_entropies + row) * p * surprise
    d *= scale
    if SOFTCAP is not None:
        d *= 1 - tanh * tanh
    tl.store(out + row * out_stride + at, d.to(out.dtype.element_ty), mask=at < columns)


class TritonRows:
    """Computes row operations by Triton kernels, with the interface of `TorchRows`."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        """dtype: type of computations. ValueError: the device is a CPU and Triton's interpreter is off."""
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("Triton needs a GPU: use backend='torch', or its interpreter (TRITON_INTERPRET=1)")
        self.fp64 = dtype == torch.float64

    def borrow(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the logits without a copy: `add_stats_` leaves them unchanged, `logit_gradient` may overwrite them."""
        return logits_CV

    def add_stats_(self, logits_CV, state_4C, targets_C, scale_C, softcap, second) -> None:
        """Update a state as `TorchRows.add_stats_` does, but leave the logits unchanged."""
        self._stats(logits_CV, state_4C, None, None, targets_C, scale_C, softcap, second)

    def add_rounded_(self, exact_CV, state_4C, kept_CV, kept_4C, targets_C, scale_C, softcap, second) -> None:
        """Implements `TorchRows.add_rounded_` in one pass over the logits."""
        assert kept_CV.shape == exact_CV.shape and kept_CV.stride(1) == 1 and kept_4C.stride() == state_4C.stride()
        self._stats(exact_CV, state_4C, kept_CV, kept_4C, targets_C, scale_C, softcap, second)

    def _stats(self, logits_CV, state_4C, kept_CV, kept_4C, targets_C, scale_C, softcap, second) -> None:
        rows, columns = logits_CV.shape
        if not rows or not columns:
            return
        assert logits_CV.stride(1) == 1 and state_4C.stride(1) == 1 and len(state_4C) == SECOND + 2
        most = (STATS_LANES_FP64, STATS_STEPS_FP64) if self.fp64 else (STATS_LANES, STATS_STEPS)
        lanes = min(most[0], max(16, triton.next_power_of_2(columns)))
        with _on(logits_CV):
            _stats_kernel[(rows,)](
                logits_CV,
                logits_CV.stride(0),
                columns,
                targets_C.contiguous(),
                scale_C,
                state_4C,
                state_4C.stride(0),
                kept_CV,
                0 if kept_CV is None else kept_CV.stride(0),
                kept_4C,
                SOFTCAP=softcap,
                SECOND=SECONDS[second],
                FP64=self.fp64,
                LANES=lanes,
                STEPS=min(most[1], triton.next_power_of_2(triton.cdiv(columns, lanes))),
                num_warps=STATS_WARPS,  # pyright: ignore[reportCallIssue] (an argument of the launch)
            )

    def logit_gradient(
        self, logits_CV, targets_C, scale_C, softcap, norm_2C, entropy_C, grad_logp_C, grad_entropy_C, out_CV=None
    ) -> torch.Tensor:
        """Implements `TorchRows.logit_gradient`: write the gradient into out_CV, in its dtype; None for the logits."""
        rows, columns = logits_CV.shape
        out_CV = logits_CV if out_CV is None else out_CV
        if not rows or not columns:
            return out_CV
        assert logits_CV.stride(1) == out_CV.stride(1) == 1 and out_CV.shape == logits_CV.shape
        assert grad_entropy_C is None or entropy_C is not None
        block = min(GRADIENT_BLOCK, max(16, triton.next_power_of_2(columns)))
        with _on(logits_CV):
            _gradient_kernel[(rows, triton.cdiv(columns, block))](
                logits_CV,
                logits_CV.stride(0),
                out_CV,
                out_CV.stride(0),
                columns,
                targets_C.contiguous(),
                scale_C,
                norm_2C[0].contiguous(),
                norm_2C[1].contiguous(),
                None if entropy_C is None else (entropy_C + norm_2C[1].log()).contiguous(),
                grad_logp_C.contiguous(),
                None if grad_entropy_C is None else grad_entropy_C.contiguous(),
                SOFTCAP=softcap,
                FP64=self.fp64,
                BLOCK=block,
                num_warps=8,  # pyright: ignore[reportCallIssue] (an argument of the launch)
            )
        return out_CV


def _on(tensor: torch.Tensor):
    """Return a context in which Triton launches on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
