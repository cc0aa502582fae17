"""Computes logp and entropy from hidden states and the output weight, without the logits of all tokens.

T tokens, D hidden, V vocabulary (this rank's part of it), C x V one block of logits. No tensor has shape [T, V]: logits
exist for one block at a time, and backward computes them again. This costs one more matmul and saves T * V numbers
(4.6 GiB in fp32 at T=8192, V=151936).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from spmdrl_kernels.backend import choose, row_operations
from spmdrl_kernels.blocks import INVARIANT_ROWS, Blocks, place_of, plan_blocks
from spmdrl_kernels.checks import check_linear, check_settings, check_values
from spmdrl_kernels.gradients import Gradients
from spmdrl_kernels.vocabulary import MAX, SECOND, SUM, TARGET, Vocabulary, new_state, open_vocabulary


def linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    entropy: bool = True,
    top: bool = False,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    batch_invariant: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target and the entropy, from hidden states and the output weight.

    The distribution is softmax(logits / temperature) with logits = hidden @ weight.T.

    Args:
        hidden_TD: float16, bfloat16, float32 or float64.
        weight_VD: same dtype and device.
        targets_T: int64 in [0, vocabulary).
        temperature: a number, or floats [T]; without gradient.
        entropy: whether to return the entropy.
        top: return, instead of the entropy and without gradient, whether the target is the likeliest token, 1 or 0.
        softcap: logits become softcap * tanh(logits / softcap) (gemma2's final_logit_softcapping); None for no cap.
        mask: bool [T]. Rows with False are dropped before any work: their results are 0, their targets arbitrary.
        group: ranks that divide the vocabulary. `weight_VD` is then this rank's consecutive rows, in the order of the
            group's ranks and of any number, 0 included; targets are global; hidden, targets, temperature, mask and the
            upstream gradients must be the same on all ranks. Three small collectives, and one of [T, D] in backward,
            which gives every rank the full gradient of hidden. The weight's gradient is this rank's part.
        valid_vocab: rows of the whole weight that count, for vocabularies padded at the end.
        batch_invariant: make a row's results and its gradient of hidden independent, to the bit, of the other rows in
            the call. All blocks then have the same number of rows, the last one padded with zeros; kernels/README.md
            has the cost.
        chunk_tokens: rows of a block of logits. Like `chunk_vocab` it changes speed, memory and rounding only.
        chunk_vocab: columns of a block. By default the size of a block depends on the device.
        backend: `triton` or `torch`; by default the environment's SPMDRL_KERNELS, else triton on a GPU and torch
            elsewhere. `liger`: see `liger.py`.

    Returns:
        logp_T and entropy_T (nats; None unless `entropy`), in fp32, or fp64 for fp64 inputs. Logits of bf16
        and fp16 inputs are fp32 (on AMD GPUs rounded); the inputs of the backward's matmuls are narrow again.
        Differentiable once in hidden and weight, through both outputs; gradients sum over T or V in fp32 (fp64).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a target is outside the vocabulary, a setting is out of its
            range, or ranks of the group have different targets.
    """
    tokens, sizes = len(hidden_TD), {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
    check_linear(hidden_TD, weight_VD, targets_T, temperature, mask)
    check_settings(softcap, sizes)
    if choose(backend, hidden_TD.device) == "liger":
        from spmdrl_kernels.liger import liger_logprob

        _refuse_for_liger(sizes | {"batch_invariant": batch_invariant or None, "top": top or None})
        return liger_logprob(hidden_TD, weight_VD, targets_T, temperature, entropy, softcap, mask, group, valid_vocab)
    kept, hidden_TD, targets_T, temperature = kept_rows(mask, hidden_TD, targets_T, temperature)
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group, batch_invariant)
    check_values(targets_T, temperature, vocabulary.total)
    if batch_invariant:
        hidden_TD, targets_T, temperature, chunk_tokens = _padded(hidden_TD, targets_T, temperature, chunk_tokens)
    blocks = plan_blocks(len(hidden_TD), vocabulary.size, hidden_TD, chunk_tokens, chunk_vocab)
    job = Job(hidden_TD, temperature, vocabulary, softcap, backend, blocks)
    logp_T, entropy_T = _LinearLogprob.apply(hidden_TD, weight_VD, targets_T, job, entropy and not top, top)
    entropy_T = None if entropy_T is None else spread(entropy_T, kept, tokens)
    return spread(logp_T, kept, tokens), entropy_T


def _refuse_for_liger(sizes: dict[str, Any]) -> None:
    """Raise ValueError for a setting that the backend `liger` does not have."""
    if names := [name for name, value in sizes.items() if value is not None]:
        raise ValueError(f"backend='liger' has no {', '.join(names)}: leave it out, or use 'triton' or 'torch'")


def kept_rows(
    mask: torch.Tensor | None, hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, float | torch.Tensor]:
    """Return the indices of the rows under the mask (None for all), and those rows of the inputs."""
    if mask is None:
        return None, hidden_TD, targets_T, temperature
    kept = torch.nonzero(mask).flatten()
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        temperature = temperature[kept]
    return kept, hidden_TD.index_select(0, kept), targets_T[kept], temperature


def _padded(
    hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float | torch.Tensor, rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor, int]:
    """Return the inputs padded with zeros to a multiple of a block's rows, and these rows.

    All matmuls then have the same shape, and the library uses the same kernel for any number of tokens.

    rows: rows of a block; None for the device's.
    """
    rows = rows or INVARIANT_ROWS[place_of(hidden_TD.device)]
    more = -len(hidden_TD) % rows
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        temperature = pad(temperature, (0, more), value=1.0)
    return pad(hidden_TD, (0, 0, 0, more)), pad(targets_T, (0, more)), temperature, rows


def spread(values: torch.Tensor, kept: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Return values of kept rows at their positions in [T], and zeros elsewhere; drops values of padded rows."""
    if kept is None:
        return values[:tokens]
    return values.new_zeros(tokens).index_copy(0, kept, values[: len(kept)])


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
    """Sum squared probabilities over the vocabulary, [T], without gradient; arguments as in `linear_logprob`.

    The sum is exp(-H2) with the Renyi entropy H2 of order 2. With logp it gives the squared norm of the gradient of
    logp by the logits: 1 - 2 p + sum p^2.
    """
    targets_T = torch.zeros(len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
    check_linear(hidden_TD, weight_VD, targets_T, temperature, None)
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab})
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group)
    check_values(targets_T, temperature, vocabulary.total)
    blocks = plan_blocks(len(hidden_TD), vocabulary.size, hidden_TD, chunk_tokens, chunk_vocab)
    job = Job(hidden_TD, temperature, vocabulary, softcap, backend, blocks)
    state_4T = job.stats(hidden_TD, weight_VD, targets_T, "collision")
    return state_4T[SECOND] / state_4T[SUM].square()


class Job:
    """The settings of one call, and its blocks."""

    def __init__(self, hidden_TD, temperature, vocabulary: Vocabulary, softcap, backend, blocks: Blocks):
        self.vocabulary, self.softcap, self.backend, self.blocks = vocabulary, softcap, backend, blocks
        self.dtype = wide(hidden_TD)
        self.scale_T = scale_of(temperature, len(hidden_TD), self.dtype, hidden_TD.device)

    def operations(self, hidden_TD: torch.Tensor) -> Any:
        """Return row operations with their own buffers."""
        return row_operations(self.backend, hidden_TD.device, self.dtype)

    def scale(self, rows: slice) -> torch.Tensor | None:
        """Return 1 / temperature of some rows; None if that is 1 for all rows."""
        return None if self.scale_T is None else self.scale_T[rows]

    def stats(self, hidden_TD, weight_VD, targets_T, second: str) -> torch.Tensor:
        """Return the state of all rows over the whole vocabulary, [4, T]."""
        state_4T = new_state(len(hidden_TD), self.dtype, hidden_TD.device)
        operations = self.operations(hidden_TD)
        for rows, columns, logits_CV in self.blocks.products(hidden_TD, weight_VD):
            at_C = targets_T[rows] - (self.vocabulary.start + columns.start)
            operations.add_stats_(logits_CV, state_4T[:, rows], at_C, self.scale(rows), self.softcap, second)
        self.vocabulary.merge_(state_4T, second)
        return state_4T


def wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of all results and sums: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def results_of(state_4T: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return logp and entropy of finished states, [T] each, and normalisers m and s, [2, T], with p = s e^(y - m).

    m is the maximum. A logsumexp instead would be rounded at the size of the logits: with logits of 16 the gradient of
    a likely token, 1 - p, would be off by 1e-6 instead of 1e-7.
    """
    log_sum_T = state_4T[SUM].log()
    logp_T = (state_4T[TARGET] - state_4T[MAX]).sub_(log_sum_T)
    # H = log sum e^z - sum e^z z / sum e^z, with z relative to the maximum
    entropy_T = log_sum_T - state_4T[SECOND] / state_4T[SUM] if entropy else None
    return logp_T, entropy_T, torch.stack([state_4T[MAX], state_4T[SUM].reciprocal()])


def is_top(state_4T: torch.Tensor) -> torch.Tensor:
    """Return, from finished states, 1 if the target's logit is the largest, else 0; [T]."""
    return (state_4T[TARGET] >= state_4T[MAX]).to(state_4T.dtype)


def scale_of(temperature, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return 1 / temperature of each token; None if it is 1 for all."""
    if not isinstance(temperature, torch.Tensor):
        if temperature == 1.0:
            return None
        return torch.full((tokens,), 1 / temperature, dtype=dtype, device=device)
    return temperature.to(dtype).reciprocal().expand(tokens).contiguous()


class _LinearLogprob(torch.autograd.Function):
    """Saves the inputs and at most three numbers per token (normalisers, entropy), nothing of size V but the weight."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, job: Job, with_entropy: bool, top: bool):
        state_4T = job.stats(hidden_TD, weight_VD, targets_T, "entropy" if with_entropy else "")
        logp_T, entropy_T, norm_2T = results_of(state_4T, with_entropy)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, norm_2T, entropy_T)
        ctx.job = job
        ctx.set_materialize_grads(False)  # the gradient of an unused output is then None, and its terms are skipped
        if top:
            top_T = is_top(state_4T)
            ctx.mark_non_differentiable(top_T)
            return logp_T, top_T
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        """Return the gradients of hidden [T, D] and weight [V, D] that are needed; computes the logits again."""
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if (grad_logp_T is None and grad_entropy_T is None) or not (need_hidden or need_weight):
            return (None,) * 6
        hidden_TD, weight_VD, targets_T, norm_2T, entropy_T = ctx.saved_tensors
        job: Job = ctx.job
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(norm_2T[0])
        sums = Gradients(job.blocks, hidden_TD, weight_VD, (need_hidden, need_weight), job.vocabulary, job.dtype)
        operations = job.operations(hidden_TD)
        # Logits are as exact as in forward; rounded to bf16, probabilities would sum to e^0.06 for a logit of 30.
        for rows, columns, logits_CV in job.blocks.products(hidden_TD, weight_VD):
            spare_CV = sums.workspace(logits_CV)
            gradient_CV = operations.logit_gradient(
                logits_CV,
                targets_T[rows] - (job.vocabulary.start + columns.start),
                job.scale(rows),
                job.softcap,
                norm_2T[:, rows],
                None if entropy_T is None else entropy_T[rows],
                grad_logp_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
                spare_CV,
            )
            sums.add(rows, columns, gradient_CV, spare_CV)
        return *sums.finish(), None, None, None, None
