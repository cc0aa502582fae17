"""Distillation: the divergence between next-token distributions of student and teacher, computed chunk by chunk.

Logits of student and teacher exist for one chunk of rows at a time. The forward pass also computes the gradient while
the chunk's logits are in memory, as in `chunked.py`. The code is plain torch on every device.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from spmdrl_kernels.blocks import Blocks, even, place_of
from spmdrl_kernels.checks import check_settings, check_states, usable
from spmdrl_kernels.divergence import Teacher, log_probabilities, outside
from spmdrl_kernels.gradients import Gradients
from spmdrl_kernels.linear import wide
from spmdrl_kernels.vocabulary import Vocabulary, some_of

HELD = 6
"""Number of [C, V] tensors that a chunk and one teacher need in memory at the same time."""
BYTES = {"cpu": 64 * 2**20, "gpu": 2 * 2**30}
"""Maximum total size in bytes of the `HELD` tensors, which determines how many rows a chunk has by default."""


def distillation_loss(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    teachers: Sequence[tuple[Teacher, torch.Tensor]],
    beta: float,
    divisor: float = 1.0,
    *,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    excluded: Sequence[int] = (),
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of weight times divergence (`generalized_jsd`) over tokens and teachers.

    The forward also computes the gradients.

    Args:
        hidden_TD: the student's hidden states, in float16, bfloat16, float32 or float64.
        weight_VD: the student's output weight, in the same dtype and on the same device.
        teachers: pairs of a teacher and the weight of its divergence in each row [T], which includes 1 / global count.
        beta: parameter of `generalized_jsd`; 0 for forward KL, 1 for reverse KL.
        divisor: number that divides the student's logits: the temperature times the divisor of the model family.
        softcap: cap on the student's logits before division, by softcap * tanh(logits / softcap); None for no cap.
        valid_vocab: only the first `valid_vocab` tokens of the vocabulary are used; None for all. If vocabularies
            differ in size, the tokens of the smallest one are used.
        excluded: token ids that have probability 0 in student and teachers, and no gradient. Not with a softcap.
        chunk_tokens: number of rows of logits in memory at the same time; affects only speed, memory and rounding.

    Returns:
        The sum, a scalar in fp64 that supports one backward; and two detached tensors in fp32 (fp64 for fp64 inputs):
        the divergence from each teacher [T, teachers] and the student's entropy [T], both in nats.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.
    """
    tokens, sizes = len(hidden_TD), [len(weight_VD), *filter(None, (t.vocab for t, _ in teachers))]
    check_states(hidden_TD, weight_VD)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    if not usable(divisor):
        raise ValueError(f"divisor must be positive and finite, got {divisor}")
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "valid_vocab": valid_vocab}, excluded)
    if any(weight_T.shape != (tokens,) for _, weight_T in teachers):
        raise ValueError(f"each teacher needs a weight for each of the {tokens} rows")
    vocab = min(sizes if valid_vocab is None else [*sizes, valid_vocab])
    blocks = plan(tokens, vocab, hidden_TD, chunk_tokens, excluded)
    job = _Job(list(teachers), beta, divisor, softcap, blocks)
    return _Distillation.apply(hidden_TD, weight_VD, job, torch.is_grad_enabled())


@torch.no_grad()
def top_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    k: int,
    divisor: float = 1.0,
    *,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    excluded: Sequence[int] = (),
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k likeliest tokens: ids [T, k], log-probabilities [T, k], log of the probability of all others [T].

    Arguments are as in `distillation_loss`, which computes bitwise the same log-probabilities for a student with the
    same states, weight, `valid_vocab` and number of rows.

    Raises:
        ValueError: k is less than 1, or not less than the number of tokens in the vocabulary that are not excluded.
    """
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "valid_vocab": valid_vocab}, excluded)
    vocab = min(len(weight_VD), valid_vocab or len(weight_VD))
    blocks = plan(len(hidden_TD), vocab, hidden_TD, chunk_tokens, excluded)
    possible = vocab - len(blocks.excluded)
    if not 1 <= k < possible:
        raise ValueError(f"k must lie in [1, {possible}), below the number of tokens, got {k}")
    dtype, device = wide(hidden_TD), hidden_TD.device
    ids_TK = torch.empty(len(hidden_TD), k, dtype=torch.int64, device=device)
    logp_TK = torch.empty(len(hidden_TD), k, dtype=dtype, device=device)
    rest_T = torch.empty(len(hidden_TD), dtype=dtype, device=device)
    for rows, _, logits_CV in blocks.products(hidden_TD, weight_VD):
        logp_CV, _ = log_probabilities(logits_CV, divisor, softcap, dtype)
        logp_TK[rows], ids_TK[rows] = torch.topk(logp_CV, k, 1)
        rest_T[rows] = outside(logp_CV, ids_TK[rows])[1]
    return ids_TK, logp_TK, rest_T


def plan(tokens: int, vocab: int, like: torch.Tensor, rows: int | None, excluded: Sequence[int] = ()) -> Blocks:
    """Return blocks of `rows` complete rows; None for as many rows as `BYTES` allows."""
    most = BYTES[place_of(like.device)] // (HELD * wide(like).itemsize * max(1, vocab))
    return Blocks(tokens, vocab, rows or even(tokens, most), vocab, some_of(excluded, vocab))


class _Job:
    """The arguments of one call of `distillation_loss`, and the blocks into which its rows are divided."""

    def __init__(self, teachers: list, beta: float, divisor: float, softcap: float | None, blocks: Blocks):
        self.teachers, self.beta, self.divisor, self.softcap, self.blocks = teachers, beta, divisor, softcap, blocks

    def chunk(self, rows: slice, blocks: tuple, logp_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergences [C, teachers], and the gradient [C, V] of their weighted sum.

        The gradient is with respect to the logits after softcap and division.

        blocks: for each teacher, its item of `Teacher.blocks` for these rows.
        """
        divergences, total_CV = [], None
        for (teacher, weight_T), block in zip(self.teachers, blocks, strict=True):
            divergence_C, gradient_CV = teacher.compare(block, logp_CV, self.beta)
            divergences.append(divergence_C)
            gradient_CV.mul_(weight_T[rows].to(gradient_CV.dtype)[:, None])
            total_CV = gradient_CV if total_CV is None else total_CV.add_(gradient_CV)
        assert total_CV is not None, "there is a teacher"
        return torch.stack(divergences, 1), total_CV


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, job: _Job, needed: bool):
        """Return the sum, the divergences [T, teachers] and the entropy [T]; store the gradients for backward."""
        need = (needed and ctx.needs_input_grad[0], needed and ctx.needs_input_grad[1])
        dtype, blocks, tokens = wide(hidden_TD), job.blocks, len(hidden_TD)
        sums = Gradients(blocks, hidden_TD, weight_VD, need, Vocabulary(0, blocks.vocab, blocks.vocab, None), dtype)
        divergence_TK = torch.zeros(tokens, len(job.teachers), dtype=dtype, device=hidden_TD.device)
        entropy_T = torch.zeros(tokens, dtype=dtype, device=hidden_TD.device)
        theirs = [teacher.blocks(blocks, dtype) for teacher, _ in job.teachers]
        for (rows, columns, logits_CV), *of_teachers in zip(
            blocks.products(hidden_TD, weight_VD), *theirs, strict=True
        ):
            spare_CV = sums.workspace(logits_CV) if any(need) else logits_CV
            logp_CV, slope_CV = log_probabilities(logits_CV, job.divisor, job.softcap, dtype)
            entropy_T[rows] = -(logp_CV.exp() * logp_CV).sum(1)
            divergence_TK[rows], gradient_CV = job.chunk(rows, tuple(of_teachers), logp_CV)
            if any(need):
                if job.divisor != 1.0:
                    gradient_CV.div_(job.divisor)
                if slope_CV is not None:
                    gradient_CV.mul_(slope_CV)
                sums.add(rows, columns, gradient_CV, spare_CV)
        ctx.sums = sums
        weight_TK = torch.stack([weight_T.double() for _, weight_T in job.teachers], 1)
        ctx.mark_non_differentiable(divergence_TK, entropy_T)
        return (divergence_TK.double() * weight_TK).sum(), divergence_TK, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        """Return the stored gradients [T, D] and [V, D], multiplied by the gradient of the sum."""
        if ctx.sums is None:
            raise RuntimeError("backward through distillation_loss works once: its gradients were freed")
        sums, ctx.sums = ctx.sums, None
        return *sums.finish(grad_total), None, None
