"""Runs recurrent layers and short convolutions of transformers over packs.

A layer's forward in transformers gets batches of rows instead of the pack. A row is one sequence, or a part of a
sequence that starts from the last state of an earlier row; the state is passed as the layer's cache. Rows of similar
length form a batch with padding at their ends, which does not affect earlier tokens. On a GPU the forward uses the
kernels of flash-linear-attention, causal-conv1d and mamba-ssm if they are installed; in all other cases it is plain
torch.

In a tree (`data/tree.py`), a node with children is a separate row without padding, unless it is a single token, and
passes its last state to its children. Some layers cannot start from a state. For them each row is a complete path from
a root to a leaf, which is exact too, but costs as much as sequences without shared prompts.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from spmdrl.policy.attention.packing import Packing, active, alike, grouped, padded
from spmdrl.spmd.devices import kind_of

CARRIERS = (
    *("GatedDeltaNet", "DeltaAttention"),
    *("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Zamba2MambaMixer"),
    "ShortConv",
)
"""Layers whose class name has one of these endings can start from a state: gated delta rules, Mamba-2, convolutions.

Mamba-1 is in OTHERS, because in transformers it can start from a state only for a single token."""
OTHERS = ("LightningAttention", "MambaMixer", "RecurrentBlock")
"""Layers whose class name has one of these endings cannot start from a state: MiniMax, Mamba-1, Griffin."""
UNUSED = ("attention_mask", "cache_params", "past_key_values")
"""Names of a layer's arguments that are set to None in a call over rows."""
OF_PACKS = (*UNUSED, "packing", "seq_idx", "cu_seq_lens_q")


# ── rows ─────────────────────────────────────────────────────────────────────

Span = tuple[int, int]
"""Consecutive tokens of a pack: the index of the first token, and the number of tokens."""


@dataclass
class RowClass:
    """B rows, padded to L places (slots), that a layer computes in one batch."""

    gather: torch.Tensor
    """int64 [B * L]: index in the pack of the token in each slot; padding slots repeat the row's first token."""
    sequences: int
    """The number of rows, B."""
    read: torch.Tensor
    """int64 [n]: the slots whose outputs are used, because no earlier row provides the output for the same token."""
    tokens: torch.Tensor
    """int64 [n]: index in the pack of the token in each slot of `read`."""
    starts: torch.Tensor | None
    """int64 [B]: index, among all states passed on so far, of the state from which each row starts; None for zeros."""
    hands: bool
    """True if the last states of the rows are passed on; they join those passed on so far in the order of the rows."""


@dataclass
class Rows:
    """All rows of a pack, in an order in which a state is computed before the rows that start from it."""

    classes: list[RowClass]
    order: torch.Tensor
    """int64 [T]: position of the output for each token in the concatenated outputs of the classes."""


def rows_of(packing: Packing, hand: bool) -> Rows:
    """Return the rows of a pack. hand: whether rows may start from states of other rows."""
    return packing.layout(("rows", hand), lambda: _plan(packing, hand))


def _plan(packing: Packing, hand: bool) -> Rows:
    """Compute `rows_of` in host memory."""
    own = [spans[-1] for spans in packing.spans]
    followed = set(packing.parents)
    # For each node, `spans` has the spans of the row that ends with it. `source` has the node from whose state this row
    # starts, or -1 for zeros, and `depth` the number of rows that must be computed before it, one after the other.
    spans: list[list[Span]] = []
    source: list[int] = []
    handing: list[bool] = []
    depth: list[int] = []
    for node, parent in enumerate(packing.parents):
        takes = parent >= 0 and handing[parent]
        spans.append([own[node]] if takes or parent < 0 else [*spans[parent], own[node]])
        source.append(parent if takes else source[parent] if parent >= 0 else -1)
        depth.append(depth[source[node]] + 1 if source[node] >= 0 else 0)
        # A row of a single token passes no state on, because transformers treats a single token after a state as a
        # generation step.
        handing.append(hand and node in followed and sum(n for _, n in spans[node]) > 1)
    classes: list[RowClass] = []
    number: dict[int, int] = {}
    seen: set[Span] = set()
    # Rows end at leaves, and at nodes that pass on their state. Any other node is computed in the row of its first
    # child.
    ends = [node for node in range(len(own)) if handing[node] or node not in followed]
    for level in range(max(depth) + 1):
        for hands, groups in ((True, grouped), (False, alike)):
            members = [node for node in ends if depth[node] == level and handing[node] == hands]
            sizes = [sum(n for _, n in spans[node]) for node in members]
            for group in groups(sizes) if members else []:
                nodes = [members[i] for i in group]
                starts = [number[source[node]] for node in nodes] if level else None
                classes.append(_row_class([spans[node] for node in nodes], seen, starts, hands))
                if hands:
                    number |= {node: len(number) + i for i, node in enumerate(nodes)}
    return Rows(classes, torch.argsort(torch.cat([c.tokens for c in classes])))


def _row_class(rows: list[list[Span]], seen: set[Span], starts: list[int] | None, hands: bool) -> RowClass:
    """Return a batch of rows.

    rows: the spans of each row. seen: spans whose outputs earlier rows provide; this function adds the spans of these
    rows. starts, hands: as in `RowClass`.
    """
    tokens, fresh = [], []
    for spans in rows:
        tokens.append(torch.cat([torch.arange(first, first + n) for first, n in spans]))
        fresh.append(torch.cat([torch.full((n,), (first, n) not in seen) for first, n in spans]))
        seen |= set(spans)
    slots, real, width = padded([0] * len(rows), [len(row) for row in tokens])
    if starts is not None and width == 1:
        slots, real = slots.expand(-1, 2), torch.tensor([[True, False]]).expand(len(rows), 2)
    gather = torch.stack([row[slot] for row, slot in zip(tokens, slots, strict=True)])
    counts = real & torch.stack([row[slot] for row, slot in zip(fresh, slots, strict=True)])
    return RowClass(
        gather.flatten(),
        len(rows),
        torch.nonzero(counts.flatten()).flatten(),
        gather[counts],
        None if starts is None else torch.tensor(starts),
        hands,
    )


# ── layers ───────────────────────────────────────────────────────────────────


class State:
    """Stands in for transformers' cache in one call of one layer; gradients can flow through its states."""

    record_past = False

    def __init__(self, start: "dict[str, torch.Tensor] | None"):
        """start: the states from which rows start; None for zeros.

        They are `conv` [B, C, k - 1], for C channels and a convolution over k tokens, and `recurrent` if the layer has
        a recurrent state.
        """
        self.start, self.last = start, {}

    @property
    def layers(self) -> Any:
        """The cache's entries for layers, by index; every index gives this object."""
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[torch.Tensor]:
        """The states of the convolution, as in transformers' cache for one layer."""
        return [self.start["conv"]] if self.start else []

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """The recurrent states, as in transformers' cache for one layer."""
        return [self.start.get("recurrent")] if self.start else [None]

    def has_previous_state(self, *_, **__) -> bool:
        """Return True if the rows of this call start from a state, False if they start from zeros."""
        return self.start is not None

    def update_conv_state(self, x_BCL: torch.Tensor, *_, conv_kernel_size: int, **__) -> torch.Tensor:
        """Return the k - 1 earlier inputs of a convolution, followed by its inputs x; store the last k - 1 of them."""
        k = conv_kernel_size
        before = self.start["conv"] if self.start else x_BCL.new_zeros(*x_BCL.shape[:2], k - 1)
        whole = torch.cat([before, x_BCL], -1)
        self.last["conv"] = whole[..., whole.shape[-1] - k + 1 :]
        return whole

    def update_recurrent_state(self, state: torch.Tensor, *_, **__) -> torch.Tensor:
        """Store the state after the last token of each row; return it."""
        self.last["recurrent"] = state
        return state


def mixes(module: nn.Module) -> bool:
    """Return True for a recurrent or convolutional layer, which mixes tokens without attention."""
    return type(module).__name__.endswith((*CARRIERS, *OTHERS))


def install(hf: nn.Module) -> None:
    """Make the layers of a HF model run over packs while a packing is `active`; without one they run unchanged."""
    for module in hf.modules():
        if mixes(module) and getattr(module.forward, "func", None) is not _forward:
            module.forward = partial(_forward, module, module.forward)


def _forward(module: Any, forward: Any, *args, **kwargs) -> Any:
    packing = active()
    if packing is None:
        return forward(*args, **kwargs)
    if packing.part.ranks > 1:
        raise ValueError(
            f"--parallel.sp {packing.part.ranks}: {type(module).__name__} passes a state from token to token and "
            "needs complete sequences; set --parallel.sp 1"
        )
    if len(packing.lengths) == 1:
        return forward(*args, **kwargs)
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    given = {**given, **given.pop("kwargs", {})}
    cache = next((name for name in ("cache_params", "past_key_values") if name in given), None)
    carries = cache is not None and type(module).__name__.endswith(CARRIERS)
    rows = rows_of(packing, carries)
    states: list[dict[str, torch.Tensor]] = []
    outputs, other = [], None
    for row_class in rows.classes:
        call = {name: _lay_out(value, row_class, packing) for name, value in given.items() if name not in OF_PACKS}
        # Padding is at the end of rows, where it affects no token, so the layer needs no mask.
        call |= {name: None for name in UNUSED if name in given}
        at, start = row_class.starts, None
        if at is not None:
            start = {name: torch.cat([state[name] for state in states]).index_select(0, at) for name in states[0]}
        state = State(start)
        if row_class.hands or row_class.starts is not None:
            call[cache] = state
        with _chunks_that_fit(module, len(row_class.gather) // row_class.sequences, packing.device):
            out = forward(**call)
        out, *other = out if isinstance(out, tuple) else (out,)
        outputs.append(out.flatten(0, 1).index_select(0, row_class.read))
        if row_class.hands:
            states.append(state.last)
    whole = torch.cat(outputs).index_select(0, rows.order)[None]
    return (whole, *(None for _ in other)) if other else whole


@contextmanager
def _chunks_that_fit(module: Any, longest: int, device: torch.device) -> Iterator[None]:
    """Limit Mamba-2's chunk size on a CPU to about the length of the rows, inside this context.

    In plain torch, the cost of a chunk is quadratic in its size, padding included. The size changes only rounding.
    """
    size = getattr(module, "chunk_size", None)
    if size is None or kind_of(device) != "cpu":
        yield
        return
    module.chunk_size = min(size, 1 << max(longest - 1, 15).bit_length())
    try:
        yield
    finally:
        module.chunk_size = size


def _lay_out(value: Any, rows: RowClass, packing: Packing) -> Any:
    """Arrange a tensor of tokens as rows, [1, T, ...] -> [B, L, ...]; return any other value unchanged."""
    if isinstance(value, tuple):
        return tuple(_lay_out(part, rows, packing) for part in value)
    if torch.is_tensor(value) and value.dim() > 1 and value.shape[:2] == (1, packing.part.tokens):
        return value[0].index_select(0, rows.gather).unflatten(0, (rows.sequences, -1))
    return value
