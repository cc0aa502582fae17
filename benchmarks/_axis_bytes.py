"""Bytes that an update of a Megatron policy sends on each axis: counted, and derived from the model's shapes.

Both are the bytes that a bandwidth-optimal algorithm sends from one rank of a group of n ranks: for an all-gather
(n - 1) times its own part, for a reduce-scatter (n - 1) times the part it keeps, for an all-reduce one of each, for a
broadcast (n - 1) / n of the tensor (the mean over ranks), for an all-to-all the rows for others, for a send its tensor.
They leave out anything that a library sends beyond that; gloo's all-reduce and NCCL's ring come close to them.
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
"""Names of groups in megatron.core.parallel_state. Axes may have the same ranks (dp, ep): names tell them apart."""
WORD = 4
"""Bytes of a float32: parameters, activations and gradients on a CPU."""


def axis_names() -> dict[str, str]:
    """Group name -> axis, of Megatron's groups as they are."""
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
    """Bytes that one rank sends in a collective, see above.

    operation, args: those of torch's dispatcher, namespace c10d; of two tensors the first argument is the output.

    Raises:
        ValueError: an operation that has no rule here.
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
    """A context manager in which `bytes[axis]` counts what this rank sends; `rest`: on groups of no axis."""

    def __init__(self):
        super().__init__()
        self.names = axis_names()
        self.bytes: dict[str, float] = dict.fromkeys((*AXES, "rest"), 0.0)
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Counts, then runs the operation."""
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            if group.size() > 1:
                # In pairs Megatron sends one way over the group of all ranks.
                axis = "pp" if func._opname == "send" else self.names.get(group.group_name, "rest")
                self.bytes[axis] += sent(func._opname, args, group.size())
                key = f"{axis} {func._opname}"
                self.calls[key] = self.calls.get(key, 0) + 1
        return func(*args, **(kwargs or {}))


@dataclass
class Shapes:
    """Sizes of a model that the formula uses: HF's names, in short."""

    hidden: int
    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    width: int
    """Width of a head."""
    inner: int
    """Columns of the feed-forward, or of one expert."""
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0
    """Experts that a token is sent to."""

    @classmethod
    def of(cls, hf: Any) -> "Shapes":
        """Makes the shapes from a config of transformers: Qwen2 or Qwen3-MoE."""
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
    """Micro-batches of one update on one rank: for each, tokens S of its padded pack, T real ones, n in the loss."""

    padded: list[int]
    """S: tokens that a rank of cp holds, before tp divides them."""
    tokens: list[int]
    predicted: list[int]


def parameters(m: Shapes, at: Any, first: bool, last: bool) -> tuple[float, float, int]:
    """Parameters of one rank: those shared by all data, those of its experts, and those that see 1 / tp of the tokens.

    at: Layout.
    """
    attention = m.hidden * m.width * (2 * m.heads + 2 * m.groups)
    bias = m.width * (m.heads + 2 * m.groups) * m.qkv_bias
    norms = 2 * m.hidden + 2 * m.width * m.qk_norm
    router = m.experts * m.hidden
    ffn = 3 * m.hidden * m.inner
    layers = m.layers // at.pp
    per_layer = (attention + bias + (0 if m.experts else ffn)) / at.tp + norms + router
    vocabulary = -(-m.vocabulary // at.tp) * m.hidden
    # A tied embedding of a pipeline stands on its first stage and on its last.
    copies = first + last - (m.tied and first and last)
    shared = layers * per_layer + copies * vocabulary + last * m.hidden
    experts = layers * m.experts * ffn / at.ep / at.etp
    whole = layers * (norms + router) + last * m.hidden
    return shared, experts, whole


def formula(m: Shapes, at: Any, work: Work, ranks: int, stage: int) -> dict[str, float]:
    """Bytes that a rank sends in one update (gradient and step of AdamW, one share of the batch), by axis.

    With b = 4 bytes, S, T and n as in `Work`, sums over micro-batches, L the layers of the rank:

    tp with sequence parallelism: w = (tp - 1) / tp * S D b is an all-gather of hidden states, or a reduce-scatter.
        Forward of a layer: gather, scatter around attention, gather, scatter around the feed-forward: 4 w. Backward:
        the transposes, 4 w, and the two inputs gathered again for the gradients of the weights: 6 w. Embedding (first
        stage) 1 w each way. Last stage: states gathered for the head 1 w. With experts instead of the feed-forward tp
        is not between tokens and experts: 5 w a layer. Gradients of what sees a part of the tokens (norms, router):
        one all-reduce.
    tp without: an all-reduce costs 2 w. Two of them each way in a layer, and one behind the embedding: 8 w, 2 w.
    tp in the head, either way: all-reduces of four numbers a predicted token (maximum, three sums) in forward, of D in
        backward, in float32; three int64 gathered as a check. A token is on one rank of cp: n / cp each, on average.
    cp: keys and values gathered in forward, their gradients scattered in backward: (cp - 1) S g d / tp b each, g
        key-value heads of width d; on the last stage two numbers a token all-reduced.
    pp: hidden states [S / tp with sequence parallelism, D] of a micro-batch over every boundary and their gradient
        back, each after its shape (3 int64) where lengths vary; the head's two numbers of all tokens broadcast to all
        stages; of a tied embedding the gradient all-reduced between the first stage and the last.
    dp, N parameters of the rank over n = dp cp ranks: gradients scattered in float32, weights gathered in b:
        (n - 1) / n * N (4 + b). Experts likewise over the ranks that hold the same.
    ep: where experts are chosen evenly, (ep - 1) / ep of S / tp * k rows go to other ranks, D numbers and a weight,
        and D come back; in backward again: 4 D b + 2 * 4 a row. How many tokens each expert gets: E int64 gathered.
        Not for etp > 1.

    at: Layout. ranks: of the job. stage: this rank's, of the pipeline.
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
