"""Distillation over two vocabularies: sorted probabilities are compared, and those of tokens that both have directly.

A row stands for a span of text, of which student and teacher give a distribution each: the probabilities of the tokens
at one place times a factor, the exponential of the row's `shift`. It is the probability of the span's other tokens,
where it has several. Logits exist for one chunk of rows at a time, as in `distill.py`.

C rows; V tokens of the student, U of the teacher; M that both have.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from spmdrl_kernels.blocks import Blocks, even, place_of
from spmdrl_kernels.checks import DTYPES, check_settings, usable
from spmdrl_kernels.distill import BYTES
from spmdrl_kernels.divergence import log_probabilities
from spmdrl_kernels.gradients import Gradients
from spmdrl_kernels.linear import wide
from spmdrl_kernels.vocabulary import Vocabulary

HELD = 12
"""Tensors of a chunk's rows and all columns that exist at a time; the places of a sort count twice."""


@dataclass(frozen=True)
class SpanTeacher:
    """A teacher of other tokens, by its hidden states and its output weight."""

    states_TE: torch.Tensor
    weight_UE: torch.Tensor
    shift_T: torch.Tensor
    """Log of the factor of its probabilities in each row."""
    divisor: float = 1.0
    softcap: float | None = None

    def blocks(self, blocks: Blocks, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Log of the factor times the probabilities, [C, U], of each block of rows."""
        theirs = Blocks(blocks.tokens, len(self.weight_UE), blocks.rows, len(self.weight_UE))
        for rows, _, logits_CU in theirs.products(self.states_TE, self.weight_UE):
            logp_CU, _ = log_probabilities(logits_CU, self.divisor, self.softcap, dtype)
            yield logp_CU.add_(self.shift_T[rows, None].to(dtype))


@dataclass(frozen=True)
class Matched:
    """Tokens that both vocabularies have."""

    student_M: torch.Tensor
    """int64, distinct."""
    teacher_M: torch.Tensor
    """The same tokens' numbers in the teacher's vocabulary."""
    beta: float
    """Of the divergence over them: see `unnormalized_jsd`."""


def sorted_distance(s_CV: torch.Tensor, t_CU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 distance of each row's sorted probabilities [C], the shorter filled up with zeros, and its slope by s [C, V].

    Universal Logit Distillation (https://arxiv.org/abs/2402.12030).
    """
    s_sorted_CV, place_CV = s_CV.sort(1, descending=True)
    t_sorted_CU = t_CU.sort(1, descending=True).values
    both = min(s_CV.shape[1], t_CU.shape[1])
    rest_C = t_sorted_CU[:, both:].sum(1)
    s_sorted_CV[:, :both] -= t_sorted_CU[:, :both]
    distance_C = s_sorted_CV.abs().sum(1) + rest_C
    return distance_C, torch.empty_like(s_CV).scatter_(1, place_CV, s_sorted_CV.sign_())


def unnormalized_jsd(s_CM: torch.Tensor, t_CM: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`generalized_jsd` of logs of numbers that need not sum to 1 [C], and its slope by s [C, M].

    As trl's `GOLDTrainer.generalized_jsd_loss` has it for probabilities.
    """
    p_CM = s_CM.exp()
    if beta == 0:
        q_CM = t_CM.exp()
        return (q_CM * (t_CM - s_CM)).sum(1), -q_CM
    if beta == 1:
        gap_CM = s_CM - t_CM
        return (p_CM * gap_CM).sum(1), p_CM * (gap_CM + 1)
    share = torch.tensor(beta, dtype=s_CM.dtype, device=s_CM.device)
    m_CM = torch.logaddexp(s_CM + torch.log1p(-share), t_CM + share.log())
    slope_CM = (1 - beta) * p_CM * (s_CM - m_CM)
    return slope_CM.sum(1) + beta * (t_CM.exp() * (t_CM - m_CM)).sum(1), slope_CM


def compare(s_CV: torch.Tensor, t_CU: torch.Tensor, matched: Matched | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The distance of each row [C] and its slope by the student's s [C, V].

    s, t: logs. matched: the tokens that are compared directly, as in GOLD, by a divergence whose weight is their share
    of the teacher's vocabulary; the others' sorted distance has the rest of it. None: all are sorted.
    """
    p_CV = s_CV.exp()
    if matched is None:
        distance_C, sign_CV = sorted_distance(p_CV, t_CU.exp())
        return distance_C, sign_CV.mul_(p_CV)
    share = len(matched.student_M) / t_CU.shape[1]
    direct_C, slope_CM = unnormalized_jsd(s_CV[:, matched.student_M], t_CU[:, matched.teacher_M], matched.beta)
    slope_CV = torch.zeros_like(s_CV)
    slope_CV[:, matched.student_M] = slope_CM * share
    mine, theirs = left_out(s_CV, matched.student_M), left_out(t_CU, matched.teacher_M)
    if not len(mine) or not len(theirs):
        return share * direct_C, slope_CV
    distance_C, sign_CN = sorted_distance(p_CV[:, mine], t_CU[:, theirs].exp())
    slope_CV[:, mine] = sign_CN.mul_(p_CV[:, mine]).mul_(1 - share)
    return share * direct_C + (1 - share) * distance_C, slope_CV


def left_out(x_CV: torch.Tensor, taken_M: torch.Tensor) -> torch.Tensor:
    """The columns that are not among some, int64."""
    left = torch.ones(x_CV.shape[1], dtype=torch.bool, device=x_CV.device)
    left[taken_M] = False
    return torch.nonzero(left).flatten()


def aligned_loss(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    shift_T: torch.Tensor,
    teacher: SpanTeacher,
    weight_T: torch.Tensor,
    matched: Matched | None = None,
    divisor: float = 1.0,
    *,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over rows of weight times distance (`compare`), with gradients taken in forward.

    Args:
        hidden_TD: of the student: float16, bfloat16, float32 or float64.
        weight_VD: same dtype and device.
        shift_T: log of the factor of the student's probabilities; without gradient here.
        teacher: of the same rows.
        weight_T: weight of each row's distance.
        matched: see `compare`.
        divisor: the student's logits are divided by it.
        softcap: logits stay within +-softcap, before the divisor; None for no cap.
        chunk_tokens: rows of logits held at a time. It changes speed, memory and rounding only.

    Returns:
        The sum (a scalar in fp64), and detached, in fp32 or for fp64 inputs fp64: its slope by each shift [T], the
        distances [T] and the student's entropy [T]. Backward through the sum works once.

    Raises:
        ValueError: shapes that do not fit, or a setting out of its range.
    """
    tokens = len(hidden_TD)
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"expected hidden [T, D] and weight [V, D], got {tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)}"
        )
    if hidden_TD.dtype not in DTYPES or weight_VD.dtype != hidden_TD.dtype:
        raise ValueError(f"hidden and weight must share one float dtype, got {hidden_TD.dtype} and {weight_VD.dtype}")
    if not usable(divisor):
        raise ValueError(f"divisor must be positive and finite, got {divisor}")
    check_settings(softcap, {"chunk_tokens": chunk_tokens})
    if any(len(x) != tokens for x in (shift_T, weight_T, teacher.shift_T, teacher.states_TE)):
        raise ValueError(f"the teacher, its shift, the student's shift and the weights need {tokens} rows each")
    widest = max(len(weight_VD), len(teacher.weight_UE))
    most = BYTES[place_of(hidden_TD.device)] // (HELD * wide(hidden_TD).itemsize * widest)
    blocks = Blocks(tokens, len(weight_VD), chunk_tokens or even(tokens, most), len(weight_VD))
    job = _Job(shift_T, teacher, weight_T, matched, divisor, softcap, blocks)
    return _Aligned.apply(hidden_TD, weight_VD, job, torch.is_grad_enabled())


@dataclass(frozen=True)
class _Job:
    shift_T: torch.Tensor
    teacher: SpanTeacher
    weight_T: torch.Tensor
    matched: Matched | None
    divisor: float
    softcap: float | None
    blocks: Blocks


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, job: _Job, needed: bool):
        """The sum, slopes, distances and entropy; gradients are kept for backward."""
        need = (needed and ctx.needs_input_grad[0], needed and ctx.needs_input_grad[1])
        dtype, blocks = wide(hidden_TD), job.blocks
        sums = Gradients(blocks, hidden_TD, weight_VD, need, Vocabulary(0, blocks.vocab, blocks.vocab, None), dtype)
        slope_T, distance_T, entropy_T = torch.zeros(3, blocks.tokens, dtype=dtype, device=hidden_TD.device)
        theirs = job.teacher.blocks(blocks, dtype)
        for (rows, columns, logits_CV), t_CU in zip(blocks.products(hidden_TD, weight_VD), theirs, strict=True):
            spare_CV = sums.room(logits_CV) if any(need) else logits_CV
            s_CV, cap_CV = log_probabilities(logits_CV, job.divisor, job.softcap, dtype)
            p_CV = s_CV.exp()
            entropy_T[rows] = -(p_CV * s_CV).sum(1)
            distance_T[rows], gradient_CV = compare(s_CV + job.shift_T[rows, None].to(dtype), t_CU, job.matched)
            whole_C1, weight_C1 = gradient_CV.sum(1, keepdim=True), job.weight_T[rows, None].to(dtype)
            slope_T[rows] = (whole_C1 * weight_C1)[:, 0]
            if any(need):
                gradient_CV.sub_(p_CV.mul_(whole_C1)).mul_(weight_C1 / job.divisor)
                if cap_CV is not None:
                    gradient_CV.mul_(cap_CV)
                sums.add(rows, columns, gradient_CV, spare_CV)
        ctx.sums = sums
        ctx.mark_non_differentiable(slope_T, distance_T, entropy_T)
        return (distance_T.double() * job.weight_T.double()).sum(), slope_T, distance_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        """Hands out the gradients [T, D] and [V, D] times that of the sum."""
        if ctx.sums is None:
            raise RuntimeError("backward through aligned_loss works once: its gradients were handed out")
        sums, ctx.sums = ctx.sums, None
        return *sums.finish(grad_total), None, None
