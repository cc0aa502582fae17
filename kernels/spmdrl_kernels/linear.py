"""Computes logp and entropy from hidden states and the output weight, without the logits of all tokens.

Shapes: T tokens, D hidden width, V tokens in this rank's part of the vocabulary, C x V one block of logits. No tensor
has shape [T, V]: logits exist for one block at a time, and backward computes them again. This costs one more matmul
and saves the memory of T * V numbers (4.6 GiB in fp32 at T=8192, V=151936).
"""

from collections.abc import Sequence
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
    group_rows: Sequence[int] | None = None,
    valid_vocab: int | None = None,
    excluded: Sequence[int] = (),
    batch_invariant: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target and the entropy, from hidden states and the output weight.

    The distribution is softmax(logits / temperature) with logits = hidden @ weight.T.

    Args:
        hidden_TD: hidden states in float16, bfloat16, float32 or float64.
        weight_VD: output weight in the same dtype and on the same device.
        targets_T: token ids, int64 in [0, vocabulary).
        temperature: a number, or floats [T]; it gets no gradient.
        entropy: whether to return the entropy.
        top: whether to return, instead of the entropy, 1 where the target is the likeliest token, else 0: [T], without
            gradient.
        softcap: logits become softcap * tanh(logits / softcap) (gemma2's final_logit_softcapping); None for no cap.
        mask: bool [T]. Rows with False are dropped before any computation; their results are 0.
        group: ranks that divide the vocabulary. With a group, `weight_VD` holds this rank's consecutive rows of the
            weight, in the order of the group's ranks; the number of rows may differ between ranks and may be 0. Targets
            are ids in the complete vocabulary. Hidden states, targets, temperature, mask and upstream gradients must be
            the same on all ranks. The forward runs three small collectives. The backward runs one of [T, D], which
            gives every rank the complete gradient of hidden_TD; the weight's gradient is that of this rank's rows.
        group_rows: number of weight rows on each rank of the group; None to gather these numbers, which makes the host
            wait for the device.
        valid_vocab: rows of the complete weight that are used, from the first; others are padding. None for all rows.
        excluded: ids of the complete vocabulary that have probability 0 and no gradient, as if their logits were -inf.
            If the target of a row is excluded, its logp is -inf and has no gradient. Ids beyond the vocabulary have no
            effect. Not with softcap.
        batch_invariant: whether a row's results and its gradient of hidden_TD are bitwise independent of the other rows
            in the call. If true, all blocks have the same number of rows; kernels/README.md lists the cost.
        chunk_tokens: rows of a block of logits; the size of a block affects only speed, memory and rounding.
        chunk_vocab: columns of a block. By default the device decides the size. If only chunk_vocab is given, a block
            has as many rows as fit into the workspace with these columns, of which a forward on a GPU uses half.
        backend: `triton`, `torch` or `liger` (`liger.py`). By default it is the value of the environment variable
            SPMDRL_KERNELS, or without that variable triton on a GPU (if it is installed) and torch on other devices.

    Returns:
        logp_T and entropy_T (in nats; None unless `entropy`), in fp32, or fp64 for fp64 inputs. For bf16 and fp16
        inputs, logits are fp32 (rounded on AMD GPUs), and the matmuls of backward have 16-bit inputs. Both outputs can
        be differentiated once, with respect to hidden_TD and weight_VD. Gradients are summed in fp32 (fp64 for fp64
        inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a target is outside the vocabulary, a setting is out of
            range, or ranks of the group have different targets. On a GPU, the values of targets and temperatures are
            checked without a wait for the device: a later call of this package or `raise_deferred` raises the error,
            and the logp of a target outside the vocabulary is nan.
    """
    tokens, sizes = len(hidden_TD), {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
    check_linear(hidden_TD, weight_VD, targets_T, temperature, mask)
    check_settings(softcap, sizes, excluded)
    if choose(backend, hidden_TD.device) == "liger":
        from spmdrl_kernels.liger import liger_logprob

        wants = {"batch_invariant": batch_invariant, "top": top, "excluded": tuple(excluded)}
        _refuse_for_liger(sizes | {name: value or None for name, value in wants.items()})
        return liger_logprob(hidden_TD, weight_VD, targets_T, temperature, entropy, softcap, mask, group, valid_vocab)
    kept, hidden_TD, targets_T, temperature = kept_rows(mask, hidden_TD, targets_T, temperature)
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group, batch_invariant, group_rows, excluded)
    check_values(targets_T, temperature, vocabulary.total)
    if batch_invariant:
        hidden_TD, targets_T, temperature, chunk_tokens = _padded(hidden_TD, targets_T, temperature, chunk_tokens)
    given = len(hidden_TD), vocabulary.size, hidden_TD, chunk_tokens, chunk_vocab, vocabulary.excluded_columns
    job = Job(hidden_TD, temperature, vocabulary, softcap, backend, plan_blocks(*given))
    logp_T, entropy_T = _LinearLogprob.apply(hidden_TD, weight_VD, targets_T, job, entropy and not top, top)
    entropy_T = None if entropy_T is None else spread(entropy_T, kept, tokens)
    return spread(logp_T, kept, tokens), entropy_T


def _refuse_for_liger(sizes: dict[str, Any]) -> None:
    """Raise ValueError if a setting that the backend `liger` does not support is not None. sizes: name -> value."""
    if names := [name for name, value in sizes.items() if value is not None]:
        raise ValueError(f"backend='liger' does not support {', '.join(names)}: use backend='triton' or 'torch'")


def kept_rows(
    mask: torch.Tensor | None, hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, float | torch.Tensor]:
    """Return the indices of the rows where the mask is True, and these rows of the inputs; None for all rows."""
    if mask is None:
        return None, hidden_TD, targets_T, temperature
    kept = torch.nonzero(mask).flatten()
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        temperature = temperature[kept]
    return kept, hidden_TD.index_select(0, kept), targets_T[kept], temperature


def _padded(
    hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float | torch.Tensor, rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor, int]:
    """Return the inputs padded to complete blocks, and the number of rows per block.

    With this padding, all matmuls have the same shape, and the matmul library uses the same kernel for any number of
    tokens.

    rows: number of rows per block; None for the device's `INVARIANT_ROWS`.
    """
    rows = rows or INVARIANT_ROWS[place_of(hidden_TD.device)]
    more = -len(hidden_TD) % rows
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        temperature = pad(temperature, (0, more), value=1.0)
    return pad(hidden_TD, (0, 0, 0, more)), pad(targets_T, (0, more)), temperature, rows


def spread(values: torch.Tensor, kept: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Return a tensor [T] with the values of the kept rows at their positions, and zeros at all other positions.

    Values of padding rows (`_padded`) are dropped. kept: indices of the kept rows; None if all T rows are kept.
    """
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
    group_rows: Sequence[int] | None = None,
    valid_vocab: int | None = None,
    excluded: Sequence[int] = (),
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the sum of squared probabilities over the vocabulary, [T], without gradient.

    Arguments are as in `linear_logprob`. The sum is exp(-H2), where H2 is the Renyi entropy of order 2. Together with
    p = exp(logp) of a token, it yields the squared norm of the gradient of logp with respect to the logits divided by
    the temperature: 1 - 2 p + sum.
    """
    targets_T = torch.zeros(len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
    check_linear(hidden_TD, weight_VD, targets_T, temperature, None)
    check_settings(softcap, {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}, excluded)
    more: dict[str, Any] = {"group_rows": group_rows, "excluded": excluded}
    vocabulary = open_vocabulary(len(weight_VD), targets_T, valid_vocab, group, **more)
    check_values(None, temperature, vocabulary.total)
    given = len(hidden_TD), vocabulary.size, hidden_TD, chunk_tokens, chunk_vocab, vocabulary.excluded_columns
    blocks = plan_blocks(*given)
    job = Job(hidden_TD, temperature, vocabulary, softcap, backend, blocks)
    state_4T = job.stats(job.operations(hidden_TD), hidden_TD, weight_VD, targets_T, "collision")
    return state_4T[SECOND] / state_4T[SUM].square()


class Job:
    """The arguments of one call, and the blocks into which its logits are divided."""

    def __init__(self, hidden_TD, temperature, vocabulary: Vocabulary, softcap, backend, blocks: Blocks):
        """Store the arguments."""
        self.vocabulary, self.softcap, self.backend = vocabulary, softcap, backend
        self.blocks = blocks
        self.dtype = wide(hidden_TD)
        self.scale_T = scale_of(temperature, len(hidden_TD), self.dtype, hidden_TD.device)

    def operations(self, hidden_TD: torch.Tensor) -> Any:
        """Return new row operations of the backend; each result has separate buffers."""
        return row_operations(self.backend, hidden_TD.device, self.dtype)

    def scale(self, rows: slice) -> torch.Tensor | None:
        """Return 1 / temperature of these rows; None if the temperature is 1 for all rows of the call."""
        return None if self.scale_T is None else self.scale_T[rows]

    def stats(self, operations: Any, hidden_TD, weight_VD, targets_T, second: str) -> torch.Tensor:
        """Return the state [4, T] (`vocabulary.py`) of all rows over the complete vocabulary. Collective.

        second: as in `TorchRows.add_stats_`.
        """
        state_4T = new_state(len(hidden_TD), self.vocabulary.size, self.dtype, hidden_TD.device)

        for rows, columns, logits_CV in self.blocks.products(hidden_TD, weight_VD):
            given = targets_T[rows], self.vocabulary.start + columns.start, self.scale(rows), self.softcap
            operations.add_stats_(logits_CV, state_4T[:, rows], *given, second, columns.start == 0)
        self.vocabulary.merge_(state_4T, second)
        return state_4T


def wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of results and sums for an input: fp64 for an fp64 input, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_top(state_4T: torch.Tensor) -> torch.Tensor:
    """Return 1 for rows whose target has the largest logit, else 0, [T]. The states cover the complete vocabulary."""
    return (state_4T[TARGET] >= state_4T[MAX]).to(state_4T.dtype)


def scale_of(temperature, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return 1 / temperature of each token, [T]; None if the temperature is the number 1."""
    if not isinstance(temperature, torch.Tensor):
        if temperature == 1.0:
            return None
        return torch.full((tokens,), 1 / temperature, dtype=dtype, device=device)
    return temperature.to(dtype).reciprocal().expand(tokens).contiguous()


class _LinearLogprob(torch.autograd.Function):
    """Saves for backward only the inputs and at most three numbers per token: two normalisers and the entropy."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, job: Job, with_entropy: bool, top: bool):
        operations = job.operations(hidden_TD)
        state_4T = job.stats(operations, hidden_TD, weight_VD, targets_T, "entropy" if with_entropy else "")
        logp_T, entropy_T, norm_2T = operations.results(state_4T, targets_T, job.vocabulary.total, with_entropy)
        logp_T = job.vocabulary.at_excluded(logp_T, targets_T, -torch.inf)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, norm_2T, entropy_T)
        ctx.job = job
        ctx.set_materialize_grads(False)  # With this setting, the gradient of an unused output is None.
        if top:
            top_T = is_top(state_4T)
            ctx.mark_non_differentiable(top_T)
            return logp_T, top_T
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        """Return the gradients of hidden [T, D] and weight [V, D], None for one that is not needed.

        The logits are computed again.
        """
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if (grad_logp_T is None and grad_entropy_T is None) or not (need_hidden or need_weight):
            return (None,) * 6
        hidden_TD, weight_VD, targets_T, norm_2T, entropy_T = ctx.saved_tensors
        job: Job = ctx.job
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(norm_2T[0])
        grad_logp_T = job.vocabulary.at_excluded(grad_logp_T, targets_T, 0.0)
        sums = Gradients(job.blocks, hidden_TD, weight_VD, (need_hidden, need_weight), job.vocabulary, job.dtype)
        operations = job.operations(hidden_TD)
        # These logits are as exact as in forward. If they were rounded to bf16, the probabilities of a row could sum to
        # e^0.06 instead of 1 at logits of 30.
        for rows, columns, logits_CV in job.blocks.products(hidden_TD, weight_VD):
            spare_CV = sums.workspace(logits_CV)
            gradient_CV = operations.logit_gradient(
                logits_CV,
                targets_T[rows],
                job.vocabulary.start + columns.start,
                job.scale(rows),
                job.softcap,
                norm_2T[:, rows],
                None if entropy_T is None else entropy_T[rows],
                grad_logp_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
                out_CV=spare_CV,
            )
            sums.add(rows, columns, gradient_CV, spare_CV)
        return *sums.finish(), None, None, None, None
