"""Divergences between next-token distributions of student and teacher, with gradients for the student's logits.

Shapes: C rows; N outcomes, which are the V tokens of the vocabulary, or K tokens and one outcome for all other tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from spmdrl_kernels.blocks import LOWEST, Blocks
from spmdrl_kernels.checks import check_settings

LEAST_REST = -1e-7
"""Upper bound on the log of the sum of K probabilities. It is needed because rounded probabilities may sum to 1 or
more, which would leave no probability for the other tokens. The value is that of trl 1.16."""


def generalized_jsd(s_CN: torch.Tensor, t_CN: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the generalized Jensen-Shannon divergence of each row [C], and its gradient [C, N].

    The gradient is with respect to the student's logits.

    s, t: finite log-probabilities of student and teacher. beta 0: forward KL(t || s). beta 1: reverse KL(s || t).
    0 < beta < 1: beta KL(t || m) + (1 - beta) KL(s || m) with the mixture m = (1 - beta) s + beta t, as in GKD
    (https://arxiv.org/abs/2306.13649) and trl's `generalized_jsd_loss`.

    The gradient is exactly 0 if s and t are bitwise equal.
    """
    p_CN = s_CN.exp()
    if beta == 0:
        q_CN = t_CN.exp()
        return (q_CN * (t_CN - s_CN)).sum(1), p_CN.sub_(q_CN)
    if beta == 1:
        gap_CN = s_CN - t_CN
        kl_C = (p_CN * gap_CN).sum(1)
        return kl_C, p_CN.mul_(gap_CN.sub_(kl_C[:, None]))
    gap_CN = t_CN - s_CN
    # This computes log(m / s) from the gap. The exponential is at most 1, so it cannot overflow, and the result is
    # exactly 0 for a gap of 0.
    share_CN = torch.full_like(gap_CN, beta).masked_fill_(gap_CN > 0, 1 - beta)
    mixed_CN = torch.expm1(-gap_CN.abs()).mul_(share_CN).log1p_().add_(gap_CN.clamp(min=0))
    kl_s_C = -(p_CN * mixed_CN).sum(1)
    kl_t_C = (t_CN.exp() * gap_CN.sub_(mixed_CN)).sum(1)
    gradient_CN = p_CN.mul_(mixed_CN.add_(kl_s_C[:, None])).mul_(beta - 1)
    return beta * kl_t_C + (1 - beta) * kl_s_C, gradient_CN


def log_probabilities(
    logits_CV: torch.Tensor, divisor: float, softcap: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities [C, V] of a block of complete rows, and the derivative of the softcap [C, V].

    The derivative is None without a softcap. The function may overwrite the logits.
    """
    z_CV, slope_CV = logits_CV.to(dtype).clamp_(min=LOWEST), None
    if softcap is not None:
        t_CV = z_CV.div_(softcap).tanh_()
        slope_CV = t_CV.square().neg_().add_(1)
        z_CV = t_CV.mul_(softcap)
    if divisor != 1.0:
        z_CV = z_CV.div_(divisor)
    # Subtract the maximum first: a logsumexp of large logits has a large rounding error, which log p would inherit.
    z_CV.sub_(z_CV.amax(1, keepdim=True))
    return z_CV.sub_(torch.logsumexp(z_CV, 1, keepdim=True)), slope_CV


def outside(logp_CV: torch.Tensor, ids_CK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [C, V] with -inf at the ids, and the log-probability [C] of any other token."""
    others_CV = logp_CV.scatter(1, ids_CK, -torch.inf)
    return others_CV, torch.logsumexp(others_CV, 1)


def log_of_rest(logp_CK: torch.Tensor) -> torch.Tensor:
    """Return the log-probability [C] of any token but the K given ones: log(1 - the sum of the K probabilities)."""
    return torch.logsumexp(logp_CK, 1).clamp(max=LEAST_REST).expm1().neg().log()


@dataclass(frozen=True)
class StatesTeacher:
    """A teacher given by its hidden states and output weight, from which all of its logits are computed."""

    states_TE: torch.Tensor
    weight_UE: torch.Tensor
    divisor: float = 1.0
    """Number that divides the teacher's logits: the temperature times the divisor of the model family."""
    softcap: float | None = None

    @property
    def vocab(self) -> int:
        """The size of the teacher's vocabulary."""
        return len(self.weight_UE)

    def blocks(self, blocks: Blocks, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the teacher's log-probabilities [C, V] of each block of complete rows."""
        check_settings(self.softcap, {}, blocks.excluded)
        for _, _, logits_CV in blocks.products(self.states_TE, self.weight_UE):
            yield log_probabilities(logits_CV, self.divisor, self.softcap, dtype)[0]

    def compare(self, block: torch.Tensor, logp_CV: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence [C] and its gradient with respect to the student's logits [C, V].

        block: an item of `blocks`.
        """
        return generalized_jsd(logp_CV, block, beta)


@dataclass(frozen=True)
class TopTeacher:
    """A teacher given by log-probabilities of K tokens in each row.

    All other tokens count as one outcome. If `renormalized` is true, they are ignored instead: the probabilities of the
    K tokens are divided by their sum, for teacher and student. An excluded token among the K gets probability 0, and
    the other outcomes are divided by the sum of their probabilities.
    """

    ids_TK: torch.Tensor
    """Token ids, int64, distinct in each row."""
    logp_TK: torch.Tensor
    rest_T: torch.Tensor | None = None
    """Log of the probability of all other tokens; None to compute it as log(1 - sum of the K probabilities)."""
    renormalized: bool = False

    @property
    def vocab(self) -> None:
        """None, because the size of the teacher's vocabulary is unknown."""
        return None

    def blocks(self, blocks: Blocks, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each block of rows the ids [C, K] and the log-probabilities of the outcomes.

        The log-probabilities are [C, K] if `renormalized` is true, else [C, K + 1].
        """
        for start in range(0, blocks.tokens, blocks.rows):
            rows = slice(start, min(start + blocks.rows, blocks.tokens))
            ids_CK, logp_CK = self.ids_TK[rows], self.logp_TK[rows].to(dtype)
            if not self.renormalized:
                rest_C = log_of_rest(logp_CK) if self.rest_T is None else self.rest_T[rows].to(dtype)
                logp_CK = torch.cat([logp_CK, rest_C[:, None]], 1)
            for token in blocks.excluded:
                hit_CK = pad(ids_CK == token, (0, logp_CK.shape[1] - ids_CK.shape[1]))
                logp_CK = logp_CK.masked_fill(hit_CK, LOWEST)
                # Rows without the token keep their numbers to the bit.
                shift_C = torch.logsumexp(logp_CK, 1).masked_fill_(~hit_CK.any(1), 0.0)
                logp_CK = logp_CK - shift_C[:, None]
            yield ids_CK, torch.log_softmax(logp_CK, 1) if self.renormalized else logp_CK

    def compare(
        self, block: tuple[torch.Tensor, torch.Tensor], logp_CV: torch.Tensor, beta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence and its gradient, as `StatesTeacher.compare` does."""
        ids_CK, t_CN = block
        s_CK = logp_CV.gather(1, ids_CK)
        if self.renormalized:
            divergence_C, gradient_CK = generalized_jsd(torch.log_softmax(s_CK, 1), t_CN, beta)
            return divergence_C, torch.zeros_like(logp_CV).scatter_(1, ids_CK, gradient_CK)
        others_CV, rest_C = outside(logp_CV, ids_CK)
        divergence_C, gradient_CN = generalized_jsd(torch.cat([s_CK, rest_C[:, None]], 1), t_CN, beta)
        # The gradient of the outcome "any other token" is divided among these other tokens in proportion to their
        # probabilities.
        spread_CV = others_CV.sub_(rest_C[:, None]).exp_().mul_(gradient_CN[:, -1:])
        return divergence_C, spread_CV.scatter_(1, ids_CK, gradient_CN[:, :-1])


Teacher = StatesTeacher | TopTeacher
