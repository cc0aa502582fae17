"""Distillation over two vocabularies: compares probabilities token by token for shared tokens, else in sorted order.

Each row of a tensor belongs to one span of text. Student and teacher each have a scaled distribution for this span: the
probabilities of the next token at one position, multiplied by exp(`shift`), the probability of the span's other tokens.
Logits exist for one chunk of rows at a time, as in `distill.py`.

Shapes: C rows; V tokens in the student's vocabulary, U in the teacher's, M in both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.function import once_differentiable

from spmdrl_kernels.blocks import Blocks, even, place_of
from spmdrl_kernels.checks import check_settings, check_states, usable
from spmdrl_kernels.distill import BYTES
from spmdrl_kernels.divergence import log_probabilities
from spmdrl_kernels.gradients import Gradients
from spmdrl_kernels.linear import wide
from spmdrl_kernels.vocabulary import Vocabulary, some_of

HELD = 12
"""Number of [C, V] tensors that a chunk needs in memory at the same time; the int64 indices of a sort count as two."""


@dataclass(frozen=True)
class SpanTeacher:
    """A teacher with another vocabulary, given by its hidden states and output weight."""

    states_TE: torch.Tensor
    weight_UE: torch.Tensor
    shift_T: torch.Tensor
    """Log of the factor that multiplies the teacher's probabilities in each row."""
    divisor: float = 1.0
    softcap: float | None = None
    excluded: Sequence[int] = ()
    """The teacher's token ids that have probability 0. Not with a softcap."""

    def blocks(self, blocks: Blocks, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the logs of the teacher's scaled probabilities, [C, U], for each block of rows."""
        check_settings(self.softcap, {}, self.excluded)
        vocab = len(self.weight_UE)
        theirs = Blocks(blocks.tokens, vocab, blocks.rows, vocab, some_of(self.excluded, vocab))
        for rows, _, logits_CU in theirs.products(self.states_TE, self.weight_UE):
            logp_CU, _ = log_probabilities(logits_CU, self.divisor, self.softcap, dtype)
            yield logp_CU.add_(self.shift_T[rows, None].to(dtype))


@dataclass(frozen=True)
class Matched:
    """The tokens that are in both vocabularies; `compare` compares their probabilities directly."""

    student_M: torch.Tensor
    """Distinct ids in the student's vocabulary, int64."""
    teacher_M: torch.Tensor
    """Ids of the same tokens, in the same order, in the teacher's vocabulary."""
    beta: float
    """Parameter `beta` of `unnormalized_jsd` over these tokens."""
    found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)
    """Cached results of `others`, because the host waits for the device to count the tokens."""

    def others(self, student: int, teacher: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the other ids, int64, of vocabularies of these sizes: the student's and the teacher's."""
        if (student, teacher) not in self.found:
            both = ((student, self.student_M), (teacher, self.teacher_M))
            self.found[student, teacher] = tuple(map(_other_ids, both))  # type: ignore[assignment]
        return self.found[student, teacher]


def _other_ids(given: tuple[int, torch.Tensor]) -> torch.Tensor:
    size, ids_M = given
    others = torch.ones(size, dtype=torch.bool, device=ids_M.device)
    return torch.nonzero(others.index_fill(0, ids_M, False)).flatten()


def sorted_distance(s_CV: torch.Tensor, t_CU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L1 distance of sorted probabilities for each row [C], and its gradient with respect to s [C, V].

    The shorter row is padded with zeros. Source: Universal Logit Distillation (https://arxiv.org/abs/2402.12030).
    """
    s_sorted_CV, place_CV = s_CV.sort(1, descending=True)
    t_sorted_CU = t_CU.sort(1, descending=True).values
    both = min(s_CV.shape[1], t_CU.shape[1])
    rest_C = t_sorted_CU[:, both:].sum(1)
    s_sorted_CV[:, :both] -= t_sorted_CU[:, :both]
    distance_C = s_sorted_CV.abs().sum(1) + rest_C
    return distance_C, torch.empty_like(s_CV).scatter_(1, place_CV, s_sorted_CV.sign_())


def unnormalized_jsd(s_CM: torch.Tensor, t_CM: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the generalized Jensen-Shannon divergence [C] of unnormalized probabilities, and its gradient [C, M].

    s, t: logs of the probabilities; the gradient is with respect to s. The formula is that of `generalized_jsd` and of
    trl's `GOLDTrainer.generalized_jsd_loss`.
    """
    p_CM = s_CM.exp()
    if beta == 0:
        q_CM = t_CM.exp()
        return (q_CM * (t_CM - s_CM)).sum(1), -q_CM
    if beta == 1:
        gap_CM = s_CM - t_CM
        return (p_CM * gap_CM).sum(1), p_CM * (gap_CM + 1)
    m_CM = torch.logaddexp(s_CM + math.log1p(-beta), t_CM + math.log(beta))
    slope_CM = (1 - beta) * p_CM * (s_CM - m_CM)
    return slope_CM.sum(1) + beta * (t_CM.exp() * (t_CM - m_CM)).sum(1), slope_CM


def compare(s_CV: torch.Tensor, t_CU: torch.Tensor, matched: Matched | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance of each row [C] and its gradient with respect to s [C, V].

    s, t: logs of the scaled probabilities of student and teacher. matched: tokens that `unnormalized_jsd` compares
    directly, as in GOLD. Their divergence is weighted by the matched share of the teacher's vocabulary, and the
    `sorted_distance` of all other tokens by the remaining share. None: all tokens are compared by `sorted_distance`.
    """
    p_CV = s_CV.exp()
    if matched is None:
        distance_C, sign_CV = sorted_distance(p_CV, t_CU.exp())
        return distance_C, sign_CV.mul_(p_CV)
    share = len(matched.student_M) / t_CU.shape[1]
    direct_C, slope_CM = unnormalized_jsd(s_CV[:, matched.student_M], t_CU[:, matched.teacher_M], matched.beta)
    slope_CV = torch.zeros_like(s_CV)
    slope_CV[:, matched.student_M] = slope_CM * share
    mine, theirs = matched.others(s_CV.shape[1], t_CU.shape[1])
    if not len(mine) or not len(theirs):
        return share * direct_C, slope_CV
    distance_C, sign_CN = sorted_distance(p_CV[:, mine], t_CU[:, theirs].exp())
    slope_CV[:, mine] = sign_CN.mul_(p_CV[:, mine]).mul_(1 - share)
    return share * direct_C + (1 - share) * distance_C, slope_CV


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
    excluded: Sequence[int] = (),
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum over rows of weight times distance (`compare`); the forward also computes its gradients.

    Args:
        hidden_TD: the student's hidden states, in float16, bfloat16, float32 or float64.
        weight_VD: the student's output weight, in the same dtype and on the same device.
        shift_T: log of the factor that multiplies the student's probabilities. The function returns its gradient,
            which autograd does not compute.
        teacher: the teacher's distributions for the same rows.
        weight_T: weight of each row's distance.
        matched: see `compare`. It must not have tokens that are excluded in the student or the teacher.
        divisor: divides the student's logits.
        softcap: cap on the student's logits before division, by softcap * tanh(logits / softcap); None for no cap.
        excluded: the student's token ids that have probability 0 and no gradient. Not with a softcap.
        chunk_tokens: number of rows of logits in memory at the same time; affects only speed, memory and rounding.

    Returns:
        The sum, a scalar in fp64 that supports one backward; and three detached tensors [T] in fp32 (fp64 for fp64
        inputs): the gradient of the sum with respect to `shift_T`, the distances, and the student's entropy in nats.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.
    """
    tokens = len(hidden_TD)
    check_states(hidden_TD, weight_VD)
    if not usable(divisor):
        raise ValueError(f"divisor must be positive and finite, got {divisor}")
    check_settings(softcap, {"chunk_tokens": chunk_tokens}, excluded)
    if any(len(x) != tokens for x in (shift_T, weight_T, teacher.shift_T, teacher.states_TE)):
        raise ValueError(f"the teacher, its shift, the student's shift and the weights need {tokens} rows each")
    vocab = len(weight_VD)
    widest = max(vocab, len(teacher.weight_UE))
    most = BYTES[place_of(hidden_TD.device)] // (HELD * wide(hidden_TD).itemsize * widest)
    blocks = Blocks(tokens, vocab, chunk_tokens or even(tokens, most), vocab, some_of(excluded, vocab))
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
        """Return the sum, shift gradients, distances and entropy; store the gradients for backward."""
        need = (needed and ctx.needs_input_grad[0], needed and ctx.needs_input_grad[1])
        dtype, blocks = wide(hidden_TD), job.blocks
        sums = Gradients(blocks, hidden_TD, weight_VD, need, Vocabulary(0, blocks.vocab, blocks.vocab, None), dtype)
        slope_T, distance_T, entropy_T = torch.zeros(3, blocks.tokens, dtype=dtype, device=hidden_TD.device)
        theirs = job.teacher.blocks(blocks, dtype)
        for (rows, columns, logits_CV), t_CU in zip(blocks.products(hidden_TD, weight_VD), theirs, strict=True):
            spare_CV = sums.workspace(logits_CV) if any(need) else logits_CV
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
        """Return the stored gradients [T, D] and [V, D], multiplied by the gradient of the sum."""
        if ctx.sums is None:
            raise RuntimeError("backward through aligned_loss works once: its gradients were freed")
        sums, ctx.sums = ctx.sums, None
        return *sums.finish(grad_total), None, None
