"""logp and entropy from hidden states and the output weight, without the logits of all tokens.

T tokens, D hidden, V vocabulary (this rank's part of it), C x V one block of logits. Nothing of shape [T, V] exists:
logits live for one block, and the backward computes them again. That costs one more matmul and saves T * V numbers
(4.6 GiB in fp32 at T=8192, V=151936).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from spmdrl_kernels.backend import row_operations
from spmdrl_kernels.blocks import Blocks, add_product_, plan_blocks
from spmdrl_kernels.checks import check_linear, check_settings, check_values
from spmdrl_kernels.vocabulary import MAX, SECOND, SUM, TARGET, Vocabulary, new_state, open_vocabulary


def linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    entropy: bool = True,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    batch_invariant: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and entropy of its distribution, from hidden states and the output weight.

    The distribution is softmax(logits / temperature) with logits = hidden @ weight.T, soft-capped to
    softcap * tanh(logits / softcap) if softcap is given (gemma2's final_logit_softcapping), before the temperature.

    Args:
        hidden_TD: float16, bfloat16, float32 or float64.
        weight_VD: same dtype and device.
        targets_T: int64 in [0, vocabulary).
        temperature: a number, or floats [T]; without gradient.
        entropy: also the entropy.
        softcap: logits stay within +-softcap; None for no cap.
        mask: bool [T]. Rows where it is False are dropped before any work: both results are 0 there, their targets
            may be anything.
        group: ranks that divide the vocabulary. `weight_VD` is then this rank's consecutive rows, the ranks' parts in
            the order of the group, of any sizes, 0 too; targets are global; hidden, targets, temperature, mask and the
            upstream gradients must be the same on all of them. Collective: three small ones, and one of [T, D] in
            backward, which gives every rank the full gradient of hidden. The weight's is this rank's part.
        valid_vocab: rows of the whole weight that count, for vocabularies padded at the end.
        batch_invariant: every row's results and its gradient of hidden are the same to the bit whichever other rows
            are in the call. Blocks then have one fixed number of rows, the last filled up with zeros; see
            kernels/README.md for what that costs.
        chunk_tokens: rows of a block of logits. Like `chunk_vocab` it changes speed and memory, and the result by
            rounding only.
        chunk_vocab: columns of a block. By default a block has as many numbers as suit the device.
        backend: `triton` or `torch`; by default the environment's SPMDRL_KERNELS, else triton where the tensors are on
            a GPU and torch elsewhere. `liger`: see `liger.py`.

    Returns:
        logp_T and entropy_T (nats; None unless `entropy`), in fp32, or fp64 for fp64 inputs. The matmul runs in the
        inputs' dtype, all else in fp32 or fp64. Differentiable once in hidden and weight, through both outputs; what
        the gradients sum over T or V is summed in fp32 (fp64).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a target outside the vocabulary, a setting out of its
            range, ranks of the group with different targets.
    """
    check_linear(hidden_TD, weight_VD, targets_T, temperature, mask)
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab})
    rows = None
    if mask is not None:
        rows = torch.nonzero(mask).flatten()
        hidden_TD, targets_T = hidden_TD.index_select(0, rows), targets_T[rows]
        temperature = temperature[rows] if isinstance(temperature, torch.Tensor) and temperature.ndim else temperature
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group)
    check_values(targets_T, temperature, vocabulary.total)
    job = Job(hidden_TD, temperature, vocabulary, softcap, chunk_tokens, chunk_vocab, batch_invariant, backend)
    logp_T, entropy_T = _LinearLogprob.apply(hidden_TD, weight_VD, targets_T, job, entropy)
    if mask is None or rows is None:
        return logp_T, entropy_T
    logp_T = logp_T.new_zeros(len(mask)).index_copy(0, rows, logp_T)
    return logp_T, None if entropy_T is None else entropy_T.new_zeros(len(mask)).index_copy(0, rows, entropy_T)


@torch.no_grad()
def collision_probability(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Sum over the vocabulary of squared probabilities, [T], without gradient; arguments as in `linear_logprob`.

    It is exp of minus the Renyi entropy of order 2, and with logp it gives the squared norm of the gradient of logp by
    the logits: 1 - 2 p + sum p^2.
    """
    targets_T = torch.zeros(len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
    check_linear(hidden_TD, weight_VD, targets_T, temperature, None)
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab})
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group)
    check_values(targets_T, temperature, vocabulary.total)
    job = Job(hidden_TD, temperature, vocabulary, softcap, chunk_tokens, chunk_vocab, False, backend)
    state_4T = job.stats(hidden_TD, weight_VD, targets_T, "collision")
    return state_4T[SECOND] / state_4T[SUM].square()


class Job:
    """The settings of one call, and the blocks that it is done in."""

    def __init__(
        self, hidden_TD, temperature, vocabulary: Vocabulary, softcap, chunk_tokens, chunk_vocab, invariant, backend
    ):
        self.vocabulary, self.softcap = vocabulary, softcap
        self.dtype = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        self.scale_T = scale_of(temperature, len(hidden_TD), self.dtype, hidden_TD.device)
        self.backend = backend
        self.blocks = plan_blocks(
            len(hidden_TD), vocabulary.size, hidden_TD.device, chunk_tokens, chunk_vocab, invariant
        )

    def rows(self, hidden_TD: torch.Tensor) -> Any:
        """The row operations, with buffers of their own."""
        return row_operations(self.backend, hidden_TD.device, self.dtype)

    def scale(self, rows: slice) -> torch.Tensor | None:
        """1 / temperature of some rows; None where that is 1."""
        return None if self.scale_T is None else self.scale_T[rows]

    def stats(self, hidden_TD, weight_VD, targets_T, second: str) -> torch.Tensor:
        """The state of all rows over the whole vocabulary, [4, T]."""
        state_4T = new_state(len(hidden_TD), self.dtype, hidden_TD.device)
        operations = self.rows(hidden_TD)
        for rows, columns, logits_CV in self.logits(hidden_TD, weight_VD):
            at_C = targets_T[rows] - (self.vocabulary.start + columns.start)
            operations.add_stats_(logits_CV, state_4T[:, rows], at_C, self.scale(rows), self.softcap, second)
        self.vocabulary.merge_(state_4T, second)
        return state_4T

    def logits(self, hidden_TD, weight_VD) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Raw logits block by block, in one buffer: the columns of some rows, then the next rows."""
        return self.blocks.products(hidden_TD, weight_VD)


def scale_of(temperature, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """1 / temperature of each token, or None where it is 1 for all."""
    if not isinstance(temperature, torch.Tensor):
        if temperature == 1.0:
            return None
        return torch.full((tokens,), 1 / temperature, dtype=dtype, device=device)
    return temperature.to(dtype).reciprocal().expand(tokens).contiguous()


class _LinearLogprob(torch.autograd.Function):
    """Saves the inputs and one or two numbers per token (logsumexp, entropy), nothing of size V beyond the weight."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, job: Job, with_entropy: bool):
        state_4T = job.stats(hidden_TD, weight_VD, targets_T, "entropy" if with_entropy else "")
        log_sum_T = state_4T[SUM].log()
        logp_T = (state_4T[TARGET] - state_4T[MAX]).sub_(log_sum_T)
        # H = log sum e^z - sum e^z z / sum e^z, all of it after the shift by the maximum
        entropy_T = log_sum_T - state_4T[SECOND].div_(state_4T[SUM]) if with_entropy else None
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, state_4T[MAX] + log_sum_T, entropy_T)
        ctx.job = job
        ctx.set_materialize_grads(False)  # an unused output then has gradient None, and its terms are skipped
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if (grad_logp_T is None and grad_entropy_T is None) or not (need_hidden or need_weight):
            return (None,) * 5
        hidden_TD, weight_VD, targets_T, lse_T, entropy_T = ctx.saved_tensors
        job: Job = ctx.job
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(lse_T)
        sums = Gradients(job.blocks, hidden_TD, weight_VD, need_hidden, need_weight, job.vocabulary, job.dtype)
        operations = job.rows(hidden_TD)
        for rows, columns, logits_CV in job.logits(hidden_TD, weight_VD):
            gradient_CV = operations.logit_gradient(
                logits_CV,
                targets_T[rows] - (job.vocabulary.start + columns.start),
                job.scale(rows),
                job.softcap,
                lse_T[rows],
                None if entropy_T is None else entropy_T[rows],
                grad_logp_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
            )
            sums.add(rows, columns, gradient_CV, logits_CV)
        return *sums.finish(), None, None, None


class Gradients:
    """Gradients of hidden and weight from those of the logits' blocks; what several blocks add to is fp32 (fp64)."""

    def __init__(self, blocks: Blocks, hidden_TD, weight_VD, need_hidden, need_weight, vocabulary, dtype):
        self.hidden_TD, self.weight_VD, self.vocabulary = hidden_TD, weight_VD, vocabulary
        # With all rows in one block, and columns in as many as it takes, the large gradient is written once, by matmuls
        # that sum over the tokens in their own registers: no fp32 copy of it, no reading it again.
        self.hidden_sum = self._sum(hidden_TD, dtype) if need_hidden else None
        once = blocks.rows >= blocks.tokens
        self.weight_sum = self._sum(weight_VD, weight_VD.dtype if once else dtype) if need_weight else None

    @staticmethod
    def _sum(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=dtype, device=like.device)

    def add(self, rows: slice, columns: slice, gradient_CV: torch.Tensor, spare_CV: torch.Tensor) -> None:
        """Take in the gradient of one block of logits. spare_CV: a block in the inputs' dtype that may be overwritten."""
        if self.weight_sum is not None:
            add_product_(self.weight_sum[columns], gradient_CV.t(), self.hidden_TD[rows])
        if self.hidden_sum is not None:
            low_CV = gradient_CV if gradient_CV.dtype == spare_CV.dtype else spare_CV.copy_(gradient_CV)
            add_product_(self.hidden_sum[rows], low_CV, self.weight_VD[columns])

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both in the inputs' dtype."""
        dtype = self.hidden_TD.dtype
        hidden = None if self.hidden_sum is None else self.vocabulary.sum_(self.hidden_sum).to(dtype)
        return hidden, None if self.weight_sum is None else self.weight_sum.to(dtype)
