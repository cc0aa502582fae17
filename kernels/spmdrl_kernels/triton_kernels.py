"""The Triton kernels of the row operations; `triton_rows.py` launches them.

A block of logits [C, V] is stored row after row in the matmul's dtype. The kernels read each logit once and compute in
fp32 (fp64 for fp64 logits). The code is not specific to CUDA: it uses no inline assembly, vendor library or warp
specialization, and its only functions of `tl` on numbers are exp, log, max and sum. It is not autotuned, because a
kernel that works in place must not run several times on the same data. Offsets are int64, because rows * columns may
exceed 2^31.
"""

import torch
import triton
import triton.language as tl

from spmdrl_kernels.vocabulary import lowest

LOWEST = tl.constexpr(lowest(torch.float32))
LOWEST_FP64 = tl.constexpr(lowest(torch.float64))


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
def _start(state, row, LANES: tl.constexpr, FIRST: tl.constexpr, FP64: tl.constexpr):
    """Return the maximum at which each lane starts: that of the row's earlier columns, or the lowest number."""
    dtype = tl.float64 if FP64 else tl.float32
    if FIRST:
        tops = tl.full([LANES], LOWEST_FP64 if FP64 else LOWEST, dtype)
    else:
        tops = tl.zeros([LANES], dtype) + tl.load(state + row)
    return tops


@triton.jit
def _join(state, state_stride, row, tops, totals, seconds, SECOND: tl.constexpr, FIRST: tl.constexpr):
    """Store the lanes' states as the row's state, merged with that of earlier blocks of columns unless FIRST."""
    top = tl.max(tops, axis=0)
    if not FIRST:
        top = tl.load(state + row)
    best = tl.maximum(top, tl.max(tops, axis=0))
    gaps = tops - best
    each = tl.exp(gaps)
    total = tl.sum(each * totals, axis=0)
    second = total * 0
    if SECOND == 1:
        second = tl.sum(each * (seconds + gaps * totals), axis=0)
    if SECOND == 2:
        second = tl.sum(each * each * seconds, axis=0)
    if not FIRST:
        before = tl.load(state + state_stride + row)
        gap = top - best
        a = tl.exp(gap)
        if SECOND == 1:
            second += a * (tl.load(state + 2 * state_stride + row) + gap * before)
        if SECOND == 2:
            second += a * a * tl.load(state + 2 * state_stride + row)
        total += a * before
    tl.store(state + row, best)
    tl.store(state + state_stride + row, total)
    tl.store(state + 2 * state_stride + row, second)


@triton.jit(do_not_specialize=["offset"])
def stats_kernel(
    logits,
    row_stride,
    columns,
    targets,
    offset,
    scales,
    state,
    state_stride,
    kept,
    kept_stride,
    kept_state,
    SOFTCAP: tl.constexpr,
    SECOND: tl.constexpr,
    FIRST: tl.constexpr,
    FP64: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Update a row's state (max, sum, second, target; see `vocabulary.py`) by its columns; one program for each row.

    A step reads LANES adjacent columns, one for each lane. Each lane has a separate state, so that threads communicate
    only once per row. When threads communicated at every step, this took half of the time. If FIRST, these are the
    row's first columns, and the contents of the state are ignored. The target's column is its id minus `offset`.

    If `kept` is given, the kernel also rounds the logits into it and updates `kept_state` by the rounded logits.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype = tl.float64 if FP64 else tl.float32
    lanes = tl.arange(0, LANES)
    steps = tl.arange(0, STEPS)
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + row)
    tops = _start(state, row, LANES, FIRST, FP64)
    totals = tl.zeros([LANES], dtype)
    seconds = tl.zeros([LANES], dtype)
    if kept is not None:
        kept_tops = _start(kept_state, row, LANES, FIRST, FP64)
        kept_totals = tl.zeros([LANES], dtype)
        kept_seconds = tl.zeros([LANES], dtype)
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
    _join(state, state_stride, row, tops, totals, seconds, SECOND, FIRST)
    if kept is not None:
        _join(kept_state, state_stride, row, kept_tops, kept_totals, kept_seconds, SECOND, FIRST)
    target = tl.load(targets + row) - offset
    here = (target >= 0) & (target < columns)
    raw = tl.load(row_logits + target, mask=here, other=0.0)
    y, _ = _distribution_logits(raw.to(dtype), scale, SOFTCAP)
    if FIRST:
        tl.store(state + 3 * state_stride + row, tl.where(here, y, 0.0))
    else:
        tl.store(state + 3 * state_stride + row, y, mask=here)


@triton.jit
def results_kernel(state, state_stride, rows, targets, vocab, logps, entropies, norm, norm_stride, BLOCK: tl.constexpr):
    """Write logp, entropy and normalizers of BLOCK rows from their states over the complete vocabulary."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    top = tl.load(state + at, mask=inside, other=0.0)
    total = tl.load(state + state_stride + at, mask=inside, other=1.0)
    y = tl.load(state + 3 * state_stride + at, mask=inside, other=0.0)
    target = tl.load(targets + at, mask=inside, other=0)
    log_total = tl.log(total)
    known = (target >= 0) & (target < vocab)
    tl.store(logps + at, tl.where(known, y - top - log_total, float("nan")), mask=inside)
    if entropies is not None:
        second = tl.load(state + 2 * state_stride + at, mask=inside, other=0.0)
        tl.store(entropies + at, log_total - second / total, mask=inside)
    tl.store(norm + at, top, mask=inside)
    tl.store(norm + norm_stride + at, 1 / total, mask=inside)


@triton.jit(do_not_specialize=["offset"])
def gradient_kernel(
    logits,
    row_stride,
    out,
    out_stride,
    columns,
    targets,
    offset,
    scales,
    norm,
    norm_stride,
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
    may be the logits themselves. The target's column is its id minus `offset`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(norm + row)
    share = tl.load(norm + norm_stride + row)
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + row)
    raw = tl.load(logits + row * row_stride + at, mask=at < columns, other=0.0)
    raw = raw.to(tl.float64) if FP64 else raw.to(tl.float32)
    y, tanh = _distribution_logits(raw, scale, SOFTCAP)
    z = y - top
    p = tl.exp(z) * share
    onehot = tl.where(at == tl.load(targets + row) - offset, 1.0, 0.0)
    d = tl.load(grad_logps + row) * (onehot - p)
    if grad_entropies is not None:
        surprise = tl.where(z > float("-inf"), z + (tl.load(entropies + row) + tl.log(share)), 0.0)
        d -= tl.load(grad_entropies + row) * p * surprise
    d *= scale
    if SOFTCAP is not None:
        d *= 1 - tanh * tanh
    tl.store(out + row * out_stride + at, d.to(out.dtype.element_ty), mask=at < columns)
