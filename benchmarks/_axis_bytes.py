"""Bytes that an update of a Megatron policy sends on each axis: measured, and computed from the model's shapes.

Both are the bytes that one rank of a group of n ranks sends under a bandwidth-optimal algorithm:

- all-gather: (n - 1) times the rank's part;
- reduce-scatter: (n - 1) times the part that the rank receives;
- all-reduce: the sum of these two;
- broadcast: (n - 1) / n of the tensor, the mean over ranks;
- all-to-all: the rows for other ranks;
- send: the tensor.

Anything else that a library sends is not counted. gloo's all-reduce and NCCL's ring come close to these numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

AXES = ("tp", "cp", "pp", "dp", "ep")
GROUPS = {
    "tp": ("TENSOR_MODEL_PARALLEL_GROUP",),
    "cp": ("CONTEXT_PARALLEL_GROUP",),
    "pp": ("PIPELINE_MODEL_PARALLEL_GROUP", "EMBEDDING_GROUP"),
    "dp": ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"),
    "ep": ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
}
"""Names of process groups in megatron.core.parallel_state by axis. Different axes may have groups of the same ranks."""
WORD = 4
"""Bytes of a float32, the type of parameters, activations and gradients on a CPU."""


def axis_names() -> dict[str, str]:
    """Return the axis of each existing process group of Megatron, by the group's name."""
    from megatron.core import parallel_state

    found = {}
    for axis, names in GROUPS.items():
        for group in (getattr(parallel_state, f"_{name}") for name in names):
            if group is not None:
                found[group.group_name] = axis
    return found


def _nbytes(x: Any) -> int:
    return x.nbytes if isinstance(x, torch.Tensor) else sum(map(_nbytes, x))


def sent(operation: str, args: tuple, ranks: int) -> float:
    """Return the bytes that one rank sends in a collective, by the rules in the module's docstring.

    operation, args: name and arguments in torch's dispatcher, namespace c10d; if an operation has an output and an
    input tensor, the output is the first argument.

    Raises:
        ValueError: there is no rule for the operation.
    """
    if operation in ("allreduce_", "allreduce_coalesced_"):
        return 2 * (ranks - 1) / ranks * _nbytes(args[0])
    if operation in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return (ranks - 1) * _nbytes(args[1])
    if operation in ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"):
        return (ranks - 1) * _nbytes(args[0])
    if operation == "alltoall_base_":
        given, splits = args[1], args[4]
        mine = dist.get_group_rank(dist.ProcessGroup.unbox(args[2]), dist.get_rank())
        kept = splits[mine] if splits else len(given) // ranks
        return _nbytes(given) * (1 - kept / len(given)) if len(given) else 0.0
    if operation == "broadcast_":
        return (ranks - 1) / ranks * _nbytes(args[0])
    if operation == "send":
        return _nbytes(args[0])
    if operation in ("recv_", "recv_any_source_", "barrier", "monitored_barrier_"):
        return 0.0
    raise ValueError(f"no rule for the bytes of c10d.{operation}: add one to benchmarks/_axis_bytes.py")


class Counter(TorchDispatchMode):
    """A context manager whose `bytes` add up what this rank sends, by axis; `rest` is for groups of no axis."""

    def __init__(self):
        super().__init__()
        self.names = axis_names()
        self.bytes: dict[str, float] = dict.fromkeys((*AXES, "rest"), 0.0)
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the bytes of an operation and run it."""
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            if group.size() > 1:
                # Megatron sends between pipeline stages, partly over the group of all ranks.
                axis = "pp" if func._opname == "send" else self.names.get(group.group_name, "rest")
                self.bytes[axis] += sent(func._opname, args, group.size())
                key = f"{axis} {func._opname}"
                self.calls[key] = self.calls.get(key, 0) + 1
        return func(*args, **(kwargs or {}))


@dataclass
class Shapes:
    """Sizes of a model that the formula uses."""

    hidden: int
    layers: int
    heads: int
    groups: int
    """Number of key-value heads."""
    width: int
    """Width of a head."""
    inner: int
    """Intermediate size of the feed-forward layer, or of one expert."""
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0
    """Number of experts that process a token."""

    @classmethod
    def of(cls, hf: Any) -> "Shapes":
        """Return the shapes of a transformers config of Qwen2 or Qwen3-MoE."""
        experts = getattr(hf, "num_experts", 0) or 0
        return cls(
            hidden=hf.hidden_size,
            layers=hf.num_hidden_layers,
            heads=hf.num_attention_heads,
            groups=hf.num_key_value_heads,
            width=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            inner=hf.moe_intermediate_size if experts else hf.intermediate_size,
            vocabulary=hf.vocab_size,
            tied=hf.tie_word_embeddings,
            qkv_bias=hf.model_type == "qwen2",
            qk_norm=hf.model_type.startswith("qwen3"),
            experts=experts,
            chosen=hf.num_experts_per_tok if experts else 0,
        )


@dataclass
class Work:
    """Numbers of tokens in the micro-batches of one update on one rank.

    `tokens` are real tokens (T), and `predicted` are tokens in the loss (n).
    """

    padded: list[int]
    """Tokens (S) of a rank of the axis cp, with padding, before the axis tp divides them."""
    tokens: list[int]
    predicted: list[int]


def parameters(m: Shapes, at: Any, first: bool, last: bool) -> tuple[float, float, int]:
    """Return three numbers of parameters of one rank.

    They are the parameters outside of experts, those of experts, and those that only process 1 / tp of the tokens with
    sequence parallelism. at: Layout. first, last: whether the rank is in the first or last pipeline stage.
    """
    attention = m.hidden * m.width * (2 * m.heads + 2 * m.groups)
    bias = m.width * (m.heads + 2 * m.groups) * m.qkv_bias
    norms = 2 * m.hidden + 2 * m.width * m.qk_norm
    router = m.experts * m.hidden
    ffn = 3 * m.hidden * m.inner
    layers = m.layers // at.pp
    per_layer = (attention + bias + (0 if m.experts else ffn)) / at.tp + norms + router
    vocabulary = -(-m.vocabulary // at.tp) * m.hidden
    # In a pipeline, a tied embedding is on the first stage and on the last one.
    copies = first + last - (m.tied and first and last)
    shared = layers * per_layer + copies * vocabulary + last * m.hidden
    experts = layers * m.experts * ffn / at.ep / at.etp
    whole = layers * (norms + router) + last * m.hidden
    return shared, experts, whole


def formula(m: Shapes, at: Any, work: Work, ranks: int, stage: int) -> dict[str, float]:
    """Return the bytes that a rank sends by axis in one update: the gradient of one batch and a step of AdamW.

    Notation: b = 4 bytes; D is the hidden size; S, T and n are the tokens of `Work`, summed over micro-batches.

    tp with sequence parallelism: an all-gather or reduce-scatter of hidden states sends w = (tp - 1) / tp * S D b.
        The forward pass of a layer has a gather and a scatter around attention, and both around the feed-forward layer:
        4 w. The backward pass has their transposes, 4 w, and gathers the two inputs again for the gradients of the
        weights, 2 w. The embedding (first stage) has 1 w in each direction. The last stage gathers the states for the
        head, 1 w. A layer with experts does not use tp around the experts: 5 w. The gradients of parameters that
        process a part of the tokens (norms, router) have one all-reduce.
    tp without sequence parallelism: an all-reduce sends 2 w. A layer has two in each direction, 8 w; the embedding has
        one, 2 w.
    tp in the head, in both cases: the forward pass all-reduces four float32 numbers per predicted token (maximum and
        three sums), and the backward pass D numbers. Three int64 are gathered as a check. A token is on one rank of cp,
        so each rank has n / cp on average.
    cp: the forward pass gathers keys and values, and the backward pass scatters their gradients. Each sends
        (cp - 1) S g d / tp b, with g key-value heads of width d. The last stage all-reduces two numbers per token.
    pp: the hidden states of a micro-batch, [S, D] or [S / tp, D] with sequence parallelism, cross every boundary, and
        their gradient returns. If lengths vary, a message with the shape (3 int64) precedes each. The head's two
        numbers per token are broadcast to all stages. The gradient of a tied embedding is all-reduced between the first
        stage and the last.
    dp: for N parameters of the rank over n = dp cp ranks, gradients are scattered in float32 and weights are gathered:
        (n - 1) / n * N (4 + b). The same holds for experts over the ranks with the same experts.
    ep: if experts are chosen evenly, (ep - 1) / ep of S / tp * k rows (k experts per token) go to other ranks with D
        numbers and a weight, and D numbers return. With the backward pass this is 4 D b + 2 * 4 per row. The number of
        tokens for each of E experts is gathered as int64. The formula does not cover etp > 1.

    at: Layout. ranks: number of ranks of the job. stage: pipeline stage of this rank.
    """
    first, last = stage == 0, stage == at.pp - 1
    S, T, n = sum(work.padded), sum(work.tokens), sum(work.predicted) / at.cp
    layers, sparse = m.layers // at.pp, bool(m.experts)
    states = S * m.hidden * WORD
    shared, experts, whole = parameters(m, at, first, last)
    out = dict.fromkeys(AXES, 0.0)

    w, both = (at.tp - 1) / at.tp * states, 2 * (at.tp - 1) / at.tp
    if at.tp > 1:
        passes = layers * (5 if sparse else 10) + 2 * first + last if at.sp else 8 * layers + 2 * first
        out["tp"] = passes * w + both * whole * WORD * at.sp
        if last:
            out["tp"] += both * n * (4 + m.hidden) * WORD + (at.tp - 1) * 24 * len(work.predicted)
    if at.cp > 1:
        out["cp"] = layers * 4 * (at.cp - 1) * S * m.groups * m.width / at.tp * WORD
        out["cp"] += last * 2 * (at.cp - 1) / at.cp * 2 * T * WORD
    if at.pp > 1:
        messages = 2 * at.virtual_stages - last - first
        shape = 24 if at.virtual_stages == 1 else 0
        out["pp"] = messages * (states / (at.tp if at.sp else 1) + shape * len(work.padded))
        out["pp"] += (at.pp - 1) / at.pp * 2 * T * WORD
        out["pp"] += (first or last) * m.tied * -(-m.vocabulary // at.tp) * m.hidden * WORD
    data, expert_data = ranks // (at.tp * at.pp), ranks // (at.pp * at.ep * at.etp)
    for count, size in ((shared, data), (experts, expert_data)):
        out["dp"] += (size - 1) / size * count * 2 * WORD
    if at.ep > 1:
        rows = S / (at.tp if at.sp else 1) * m.chosen
        out["ep"] = layers * (at.ep - 1) / at.ep * rows * (4 * m.hidden * WORD + 2 * 4)
        out["ep"] += layers * (at.ep - 1) * m.experts * 8 * len(work.padded)
    return out
