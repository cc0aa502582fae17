"""Runs transformers' recurrent layers and short convolutions over packed batches.

Instead of the packed batch, the transformers layer gets batches of rows. A row is a sequence, or a part of a sequence
that starts from the final state of an earlier row; states are passed as the layer's cache. Rows of similar length form
a batch, padded on the right, where padding does not affect earlier tokens. On GPUs, layers use the kernels of
flash-linear-attention, causal-conv1d and mamba-ssm if installed, and plain torch otherwise.

In a tree (`data/tree.py`), a node with children is a separate row without padding (unless it is a single token) and
passes its final state to its children. For layers that cannot start from a state, each row is a complete path from root
to leaf. This is also exact, but costs as much as running sequences without shared prompts.
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
"""Class name suffixes of layers that can start from a state: gated delta rules, Mamba-2, convolutions. Mamba-1 is in
OTHERS, because in transformers it can only start from a state for a single token."""
OTHERS = ("LightningAttention", "MambaMixer", "RecurrentBlock")
"""Class name suffixes of layers that cannot start from a state: MiniMax, Mamba-1, Griffin."""
UNUSED = ("attention_mask", "cache_params", "past_key_values")
"""Layer arguments that are set to None when running over rows."""
OF_PACKS = (*UNUSED, "packing", "seq_idx", "cu_seq_lens_q")


# ── rows ─────────────────────────────────────────────────────────────────────

Span = tuple[int, int]
"""Consecutive packed tokens: index of the first token, and number of tokens."""


@dataclass
class RowClass:
    """B rows, padded to L slots, that a layer processes as one batch."""

    gather: torch.Tensor
    """int64 [B * L]: packed index of the token in each slot; padding slots repeat the first token of the row."""
    sequences: int
    """Number of rows, B."""
    read: torch.Tensor
    """int64 [n]: slots whose outputs are used. Padding is excluded, and so are tokens whose output an earlier row
    provides."""
    tokens: torch.Tensor
    """int64 [n]: packed index of the token in each slot in `read`."""
    starts: torch.Tensor | None
    """int64 [B]: index of each row's initial state among all states passed on so far, or None to start from zeros."""
    hands: bool
    """True if the final states of the rows are passed on; they are appended to the states passed on so far."""


@dataclass
class Rows:
    """All rows of a packed batch, ordered so that each state is computed before the rows that start from it."""

    classes: list[RowClass]
    order: torch.Tensor
    """int64 [T]: index of each token's output in the concatenated outputs of all classes."""


def rows_of(packing: Packing, hand: bool) -> Rows:
    """Return the rows of a packed batch. hand: True if rows may start from the states of other rows."""
    return packing.layout(("rows", hand), lambda: _plan(packing, hand))


def _plan(packing: Packing, hand: bool) -> Rows:
    """Compute `rows_of` in host memory."""
    own = [spans[-1] for spans in packing.spans]
    followed = set(packing.parents)
    # For each node, `spans` holds the spans of the row that ends with the node, and `source` the node whose state this
    # row starts from (-1 for zeros). `depth` is the number of rows that must be computed, one after the other, before
    # this row.
    spans: list[list[Span]] = []
    source: list[int] = []
    handing: list[bool] = []
    depth: list[int] = []
    for node, parent in enumerate(packing.parents):
        takes = parent >= 0 and handing[parent]
        spans.append([own[node]] if takes or parent < 0 else [*spans[parent], own[node]])
        source.append(parent if takes else source[parent] if parent >= 0 else -1)
        depth.append(depth[source[node]] + 1 if source[node] >= 0 else 0)
        # A single-token row does not pass its state on, because transformers treats a single token after a state as a
        # generation step.
        handing.append(hand and node in followed and sum(n for _, n in spans[node]) > 1)
    classes: list[RowClass] = []
    number: dict[int, int] = {}
    seen: set[Span] = set()
    # Rows end at leaves and at nodes that pass their state on. All other nodes are computed in the row of their first
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

    rows: the spans of each row. seen: spans whose outputs are provided by earlier rows; updated in place. starts,
    hands: as in `RowClass`.
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
    """Stands in for transformers' cache during one call of one layer, with differentiable states."""

    record_past = False

    def __init__(self, start: "dict[str, torch.Tensor] | None"):
        """start: initial states of the rows, or None for zeros.

        States are `conv` [B, C, k - 1] for C channels and kernel size k, and `recurrent` if the layer has a recurrent
        state.
        """
        self.start, self.last = start, {}

    @property
    def layers(self) -> Any:
        """Cache entries by layer index; every index returns this object."""
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[torch.Tensor]:
        """The convolution states, as in transformers' cache for one layer."""
        return [self.start["conv"]] if self.start else []

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """The recurrent states, as in transformers' cache for one layer."""
        return [self.start.get("recurrent")] if self.start else [None]

    def has_previous_state(self, *_, **__) -> bool:
        """Return True if rows start from a state, False if they start from zeros."""
        return self.start is not None

    def update_conv_state(self, x_BCL: torch.Tensor, *_, conv_kernel_size: int, **__) -> torch.Tensor:
        """Return the previous k - 1 convolution inputs concatenated with x; store the last k - 1 inputs."""
        k = conv_kernel_size
        before = self.start["conv"] if self.start else x_BCL.new_zeros(*x_BCL.shape[:2], k - 1)
        whole = torch.cat([before, x_BCL], -1)
        self.last["conv"] = whole[..., whole.shape[-1] - k + 1 :]
        return whole

    def update_recurrent_state(self, state: torch.Tensor, *_, **__) -> torch.Tensor:
        """Store and return the state after the last token of each row."""
        self.last["recurrent"] = state
        return state


def mixes(module: nn.Module) -> bool:
    """Return True for recurrent and convolutional layers, which mix tokens without attention."""
    return type(module).__name__.endswith((*CARRIERS, *OTHERS))


def install(hf: nn.Module) -> None:
    """Make the layers of an HF model run over packed batches whenever a packing is `active`."""
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
        # Rows are padded on the right, where padding affects no token, so the layer needs no mask.
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
    """Limit Mamba-2's chunk size on CPU to about the row length, inside this context.

    In plain torch, the cost of a chunk is quadratic in its size, including padding. The chunk size only affects
    rounding.
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
    """Rearrange a token tensor into rows, [1, T, ...] -> [B, L, ...]; return any other value unchanged."""
    if isinstance(value, tuple):
        return tuple(_lay_out(part, rows, packing) for part in value)
    if torch.is_tensor(value) and value.dim() > 1 and value.shape[:2] == (1, packing.part.tokens):
        return value[0].index_select(0, rows.gather).unflatten(0, (rows.sequences, -1))
    return value
