"""Computes a loss of logp and entropy chunk by chunk, so that its gradient needs no second pass over the vocabulary.

`linear_logprob` computes the logits twice (4 matmuls), because the loss is unknown when they are first computed. If a
token's loss depends on that token only, loss and gradient can be computed while the logits of the token's chunk are in
memory, so 3 matmuls are enough.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from spmdrl_kernels.backend import row_operations
from spmdrl_kernels.blocks import (
    BLOCK_ROWS,
    EXACT_BYTES,
    WORKSPACE_BYTES,
    even,
    narrow,
    place_of,
    plan_rows,
    product_,
    spans,
)
from spmdrl_kernels.checks import check_linear, check_settings, check_values
from spmdrl_kernels.deferred import check_later
from spmdrl_kernels.gradients import Gradients
from spmdrl_kernels.linear import Job, is_top, kept_rows, spread
from spmdrl_kernels.reference import TorchRows
from spmdrl_kernels.vocabulary import new_state, open_vocabulary

LossFn = Callable[[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]], Any]
"""The caller's loss of a chunk of C rows: a function (logp [C], entropy [C] or None, inputs of these rows) -> loss [C],
or (loss [C], dict of tensors [C] to log)."""


def chunked_loss(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    loss_fn: LossFn,
    inputs: Mapping[str, torch.Tensor] | None = None,
    temperature: float | torch.Tensor = 1.0,
    *,
    entropy: bool = True,
    top: bool = False,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    excluded: Sequence[int] = (),
    chunk_tokens: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the caller's loss over tokens; the forward also computes its gradients (3 matmuls, not 4).

    Arguments are as in `linear_logprob`, except:

    - loss_fn: see `LossFn`. Each token's loss includes its final weight (such as 1 / global count), does not depend on
      other tokens, and has a gradient through logp and entropy only. `loss_fn` may also be called with zero tokens.
    - inputs: tensors [T, ...] without gradient (advantages, old logp); `loss_fn` gets the chunk's rows of each.
    - entropy: whether `loss_fn` gets the entropy.
    - group: its ranks run a few collectives in each chunk, so `chunk_tokens` must be the same on all of them.
    - chunk_tokens: number of rows of logits, with all columns, in memory at the same time.
    - backend: `triton` or `torch`.

    Returns:
        The sum (a scalar in the loss's dtype, summed in fp64) and a dict of detached [T] tensors, 0 outside the mask:
        `logp`, `entropy` and `top` if requested, `loss`, and the tensors that `loss_fn` logs. The sum supports one
        backward. If gradients are disabled (`torch.no_grad`), only the loss is computed.

    Raises:
        ValueError: as in `linear_logprob`; or `loss_fn` does not return [C] tensors, logs a reserved name, depends on
            neither logp nor entropy, or returns another loss for a token when other tokens are removed (tested on the
            first chunk with several rows); or inputs have another length or a gradient.
    """
    check_linear(hidden_TD, weight_VD, targets_T, temperature, mask)
    check_settings(softcap, {"chunk_tokens": chunk_tokens}, excluded)
    tokens, inputs = len(hidden_TD), dict(inputs or {})
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (tokens,) or value.requires_grad:
            raise ValueError(
                f"inputs[{name!r}] must be [T, ...] ({tokens} here) without gradient, got "
                f"{tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)}"
            )
    kept, hidden_TD, targets_T, temperature = kept_rows(mask, hidden_TD, targets_T, temperature)
    if kept is not None:
        inputs = {name: value[kept] for name, value in inputs.items()}
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group, excluded=excluded)
    check_values(targets_T, temperature, vocabulary.total)
    blocks = plan_rows(len(hidden_TD), vocabulary.total, hidden_TD, chunk_tokens)
    blocks = plan_rows(len(hidden_TD), vocabulary.size, hidden_TD, blocks.rows, vocabulary.excluded_columns)
    job = Job(hidden_TD, temperature, vocabulary, softcap, backend, blocks)
    needed = torch.is_grad_enabled()
    caller = _Caller(loss_fn, inputs, entropy, top)
    total, *columns = _ChunkedLoss.apply(hidden_TD, weight_VD, targets_T, job, caller, needed)
    return total, {name: spread(value, kept, tokens) for name, value in zip(caller.names, columns, strict=True)}


ENTANGLED = (
    "the loss that loss_fn returns for a token depends on other tokens, such as those of its sequence, so it cannot be "
    "computed chunk by chunk: use linear_logprob, whose logp is differentiable"
)


class _Caller:
    """Calls the caller's loss function on one chunk and checks its results."""

    def __init__(self, loss_fn: LossFn, inputs: dict[str, torch.Tensor], entropy: bool, top: bool):
        self.loss_fn, self.inputs, self.entropy, self.top = loss_fn, inputs, entropy, top
        self.names: list[str] = []
        """Names of the tensors [T] that `_ChunkedLoss` returns after the sum, in their order."""

    def __call__(self, logp_C, entropy_C, at) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss [C] and the tensors to log [C] for the rows with the indices `at`."""
        result = self.loss_fn(logp_C, entropy_C, {name: value[at] for name, value in self.inputs.items()})
        loss_C, extra = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss_C, torch.Tensor) or not isinstance(extra, Mapping):
            raise ValueError(f"loss_fn must return loss [C], or (loss [C], dict of [C] tensors), got {type(result)}")
        if taken := {"logp", "entropy", "top", "loss"} & extra.keys():
            raise ValueError(f"loss_fn logs {sorted(taken)}, names that chunked_loss uses itself: choose other names")
        for name, value in {"loss": loss_C, **extra}.items():
            if value.shape != logp_C.shape:
                raise ValueError(
                    f"loss_fn must return one {name} per token, {tuple(logp_C.shape)}, got {tuple(value.shape)}: use "
                    "linear_logprob for a loss that is a sum or a mean over tokens"
                )
        return loss_C, dict(extra)

    @torch.no_grad()
    def check_separable(self, loss_C, logp_C, entropy_C, rows: slice) -> None:
        """Raise ValueError if a token's loss changes when every second token is removed from the chunk.

        On a GPU, a later call raises the error (`deferred.py`). loss_C: the loss of the whole chunk.
        """
        same = []
        for first in (0, 1):
            at = torch.arange(rows.start, rows.stop, device=logp_C.device)[first::2]
            part, _ = self(logp_C[first::2], None if entropy_C is None else entropy_C[first::2], at)
            same.append(torch.isclose(part, loss_C[first::2], rtol=1e-4, atol=1e-12, equal_nan=True).all())
        check_later(torch.stack(same), lambda same: "" if all(same) else ENTANGLED)


def _states(
    job: Job,
    operations,
    logits_CV,
    hidden_CD,
    weight_VD,
    targets_C,
    scale_C,
    pieces: list[slice],
    rounded: bool,
    second,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a chunk; return the states [4, C] (`vocabulary.py`) of the exact and of the stored logits.

    A logp from rounded logits would differ from that of `linear_logprob` by 2^-9 of the logit, and the ratio to an old
    logp would not be 1. So 16-bit logits are computed in fp32, piece by piece, before they are rounded and stored. The
    gradient is computed from the stored logits and their logsumexp.

    rounded: True if the stored logits are rounded to 16 bits, so that they need a separate state. If False, both states
    are the same tensor.
    """
    n, vocab = logits_CV.shape
    state_4C = kept_4C = new_state(n, vocab, job.dtype, hidden_CD.device)

    def given(columns: slice) -> tuple:
        return targets_C, job.vocabulary.start + columns.start, scale_C, job.softcap, second, columns.start == 0

    if narrow(hidden_CD):
        kept_4C = new_state(n, vocab, job.dtype, hidden_CD.device) if rounded else state_4C
        step = even(vocab, EXACT_BYTES[place_of(hidden_CD.device)] // (4 * max(1, n)), 256)
        for _, columns, exact_CV in replace(job.blocks, tokens=n, rows=n, columns=step).products(hidden_CD, weight_VD):
            if rounded:
                operations.add_rounded_(exact_CV, state_4C, logits_CV[:, columns], kept_4C, *given(columns))
            else:
                operations.add_stats_(operations.borrow(exact_CV), state_4C, *given(columns))
    else:
        for columns in pieces:
            piece_CV = logits_CV[:, columns]
            product_(piece_CV, hidden_CD, weight_VD[columns].t(), False)
            job.blocks.exclude_(piece_CV, columns)
            operations.add_stats_(operations.borrow(piece_CV), state_4C, *given(columns))
    job.vocabulary.merge_(state_4C, second)
    if rounded:
        job.vocabulary.merge_(kept_4C, second)
    return state_4C, kept_4C


@torch.enable_grad()
def _differentiated(caller: _Caller, logp_C, entropy_C, rows: slice, wanted: bool) -> tuple[torch.Tensor, dict, list]:
    """Return the caller's loss [C], the tensors to log, and the loss's gradients with respect to logp and entropy.

    wanted: whether to compute gradients; a gradient is None if it is not wanted or does not exist.
    """
    leaves = [x.detach().requires_grad_(wanted) for x in (logp_C, entropy_C) if x is not None]
    loss_C, extra = caller(leaves[0], leaves[1] if caller.entropy else None, rows)
    gradients = [None, None]
    if wanted:
        if not loss_C.requires_grad:
            raise ValueError("the result of loss_fn depends on neither logp nor entropy, so it has no gradient")
        gradients = [*torch.autograd.grad(loss_C.sum(), leaves, allow_unused=True), None]
    return loss_C, extra, gradients


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, job: Job, caller: _Caller, needed: bool):
        """Return the sum (a scalar) and the logged tensors [T]; store the gradients for backward."""
        need = (needed and ctx.needs_input_grad[0], needed and ctx.needs_input_grad[1])
        dtype, vocabulary = job.dtype, job.vocabulary
        operations = row_operations(job.backend, hidden_TD.device, dtype)
        second = "entropy" if caller.entropy else ""
        parts: list[dict[str, torch.Tensor]] = []
        checked = False
        buffer = hidden_TD.new_empty(min(job.blocks.rows, len(hidden_TD)) * vocabulary.size)
        # Plain torch processes a chunk in pieces of columns that fit into a CPU's cache.
        step = (
            WORKSPACE_BYTES["cpu"] // 4 // BLOCK_ROWS["cpu"]
            if isinstance(operations, TorchRows)
            else job.blocks.columns
        )
        pieces = list(spans(vocabulary.size, step))
        sums = Gradients(replace(job.blocks, columns=step), hidden_TD, weight_VD, need, vocabulary, dtype)
        for rows in spans(len(hidden_TD), job.blocks.rows):
            n, scale_C, hidden_CD, targets_C = rows.stop - rows.start, job.scale(rows), hidden_TD[rows], targets_T[rows]
            logits_CV = buffer[: n * vocabulary.size].view(n, vocabulary.size)
            rounded = narrow(hidden_TD) and any(need)
            state_4C, rounded_4C = _states(
                job, operations, logits_CV, hidden_CD, weight_VD, targets_C, scale_C, pieces, rounded, second
            )
            known = targets_C, vocabulary.total, caller.entropy
            logp_C, entropy_C, _ = exact = operations.results(state_4C, *known)
            logp_C = vocabulary.at_excluded(logp_C, targets_C, -torch.inf)
            _, flatness_C, norm_2C = exact if rounded_4C is state_4C else operations.results(rounded_4C, *known)
            loss_C, extra, gradients = _differentiated(caller, logp_C, entropy_C, rows, any(need))
            if not checked and n > 1:
                caller.check_separable(loss_C, logp_C, entropy_C, rows)
                checked = True
            part = {"logp": logp_C} | ({} if entropy_C is None else {"entropy": entropy_C})
            part |= {"top": is_top(state_4C)} if caller.top else {}
            parts.append(part | {"loss": loss_C.detach()} | {name: value.detach() for name, value in extra.items()})
            if not any(need):
                continue
            grad_logp_C = torch.zeros_like(norm_2C[0]) if gradients[0] is None else gradients[0]
            grad_logp_C = vocabulary.at_excluded(grad_logp_C, targets_C, 0.0)
            for columns in pieces:
                block_CV, offset = logits_CV[:, columns], vocabulary.start + columns.start
                inputs = (targets_C, offset, scale_C, job.softcap, norm_2C, flatness_C, grad_logp_C, gradients[1])
                sums.add(rows, columns, operations.logit_gradient(operations.borrow(block_CV), *inputs), block_CV)
        ctx.sums = sums
        if not parts:
            # A rank without tokens must return tensors with the same names and dtypes as the other ranks.
            none = [targets_T.new_zeros(0, dtype=dtype)] * (1 + caller.entropy)
            loss_C, extra = caller(none[0], none[1] if caller.entropy else None, slice(0, 0))
            part = dict(zip(("logp", "entropy"), none, strict=False)) | ({"top": none[0]} if caller.top else {})
            parts = [part | {"loss": loss_C} | extra]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        caller.names = list(columns)
        total = columns["loss"].sum(dtype=torch.float64).to(columns["loss"].dtype)
        ctx.mark_non_differentiable(*columns.values())
        return total, *columns.values()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        """Return the stored gradients [T, D] and [V, D], multiplied by the gradient of the sum."""
        if ctx.sums is None:
            raise RuntimeError("backward through chunked_loss works once: its gradients were freed")
        sums, ctx.sums = ctx.sums, None
        # Multiply by the factor even if it is 1, because testing its value would make the host wait for the device.
        return *sums.finish(grad_total), None, None, None, None
