"""Computes logp and entropy from given logits. Shapes: T tokens, V tokens in this rank's part of the vocabulary."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from spmdrl_kernels.backend import row_operations
from spmdrl_kernels.blocks import BLOCK_ROWS, WORKSPACE_BYTES, spans
from spmdrl_kernels.checks import DTYPES, check_rows, check_settings, check_values
from spmdrl_kernels.linear import scale_of, wide
from spmdrl_kernels.reference import TorchRows
from spmdrl_kernels.vocabulary import Vocabulary, new_state, open_vocabulary


def token_logprob(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    entropy: bool = True,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target and the entropy of its distribution, in one pass over the logits.

    Args:
        logits_TV: logits in float16, bfloat16, float32 or float64, with any strides. A logit of -inf excludes a token.
        targets_T: token ids, int64 in [0, vocabulary).
        temperature: a number, or floats [T]; it gets no gradient.
        entropy: whether to return the entropy.
        softcap: as in `linear_logprob`; None for no cap.
        group: ranks that divide the vocabulary, as in `linear_logprob`.
        valid_vocab: only the first `valid_vocab` columns of the complete vocabulary are used; None for all.
        inplace_backward: whether backward writes the gradient over the logits, which saves a second tensor of their
            size. torch raises an error if another part of the graph still needs the logits.
        backend: `triton` or `torch`, as in `linear_logprob`.

    Returns:
        logp_T and entropy_T (in nats; None unless `entropy`), in fp32, or fp64 for fp64 logits. Both can be
        differentiated once, with respect to the logits.

    Raises:
        ValueError: as in `linear_logprob`.
    """
    if logits_TV.ndim != 2 or logits_TV.dtype not in DTYPES:
        raise ValueError(
            f"expected logits [T, V] in fp16, bf16, fp32 or fp64, got {tuple(logits_TV.shape)} {logits_TV.dtype}"
        )
    check_rows("logits", logits_TV, targets_T, temperature, None)
    check_settings(softcap, {})
    vocabulary = open_vocabulary(logits_TV.shape[1], targets_T, valid_vocab, group)
    scale_T = scale_of(temperature, len(logits_TV), wide(logits_TV), logits_TV.device)
    if logits_TV.stride(1) != 1 or logits_TV.stride(0) < logits_TV.shape[1]:
        # A kernel needs rows of adjacent columns that do not overlap in memory, because it may overwrite them.
        logits_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format).copy_(logits_TV)
    settings = vocabulary, softcap, backend
    results = _TokenLogprob.apply(logits_TV, targets_T, scale_T, settings, entropy, inplace_backward)
    # The kernel takes less than a millisecond, so a GPU would be idle while the host launches the checks before it.
    check_values(targets_T, temperature, vocabulary.total)
    return results


def _blocks(operations, logits_TV: torch.Tensor, size: int):
    """Yield blocks of the logits as (rows, columns, view).

    A block for a kernel has all rows, and all of the first `size` columns. A block for plain torch fits into a cache.
    """
    rows, columns = max(1, len(logits_TV)), max(1, size)
    if isinstance(operations, TorchRows):
        rows = BLOCK_ROWS["cpu"]
        columns = WORKSPACE_BYTES["cpu"] // 4 // rows
    for r in spans(len(logits_TV), rows):
        for c in spans(size, columns):
            yield r, c, logits_TV[r, c]


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, targets_T, scale_T, settings, with_entropy, inplace):
        """Return logp [T], and entropy [T] or None."""
        vocabulary, softcap, backend = settings
        dtype = wide(logits_TV)
        operations = row_operations(backend, logits_TV.device, dtype)
        state_4T = new_state(len(logits_TV), vocabulary.size, dtype, logits_TV.device)
        second = "entropy" if with_entropy else ""
        for rows, columns, logits_CV in _blocks(operations, logits_TV, vocabulary.size):
            scale_C = None if scale_T is None else scale_T[rows]
            given = targets_T[rows], vocabulary.start + columns.start, scale_C, softcap, second, columns.start == 0
            operations.add_stats_(operations.borrow(logits_CV), state_4T[:, rows], *given)
        vocabulary.merge_(state_4T, second)
        logp_T, entropy_T, norm_2T = operations.results(state_4T, targets_T, vocabulary.total, with_entropy)
        ctx.save_for_backward(logits_TV, targets_T, scale_T, norm_2T, entropy_T)
        ctx.settings, ctx.inplace = settings, inplace
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        """Return the gradient of the logits [T, V]; if `inplace` is true, it is written over the logits."""
        if grad_logp_T is None and grad_entropy_T is None:
            return (None,) * 6
        logits_TV, targets_T, scale_T, norm_2T, entropy_T = ctx.saved_tensors
        vocabulary, softcap, backend = ctx.settings
        vocabulary: Vocabulary
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(norm_2T[0])
        operations = row_operations(backend, logits_TV.device, norm_2T.dtype)
        out_TV = logits_TV if ctx.inplace else logits_TV.clone()
        for rows, columns, block_CV in _blocks(operations, out_TV, vocabulary.size):
            gradient_CV = operations.logit_gradient(
                operations.borrow(block_CV),
                targets_T[rows],
                vocabulary.start + columns.start,
                None if scale_T is None else scale_T[rows],
                softcap,
                norm_2T[:, rows],
                None if entropy_T is None else entropy_T[rows],
                grad_logp_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
            )
            if gradient_CV is not block_CV:
                block_CV.copy_(gradient_CV)
        out_TV[:, vocabulary.size :] = 0
        return out_TV, None, None, None, None, None
