"""Runs layers that mix tokens without attention over packs: recurrent layers and short convolutions of transformers.

A layer runs the forward of transformers on rows instead of the pack: on a GPU with the kernels of
flash-linear-attention, causal-conv1d and mamba-ssm if they are installed, else in plain torch. A row is one sequence,
or a part of one that starts from the last state of an earlier row; the state is passed as the layer's cache. Rows of
similar length form a batch with padding on the right, which does not affect tokens before it.

In a tree (`data/tree.py`), a node with children is a separate row without padding, and passes its last state to its
children. For layers that cannot start from a state, each row is a complete path from a root to a leaf. This is exact
too, and costs as much as sequences without shared prompts.
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
"""Endings of class names of layers that can start from a state: gated delta rules, Mamba-2, short convolutions.

Mamba-1 is not among them, because transformers lets it start from a state only for a single token."""
OTHERS = ("LightningAttention", "MambaMixer", "RecurrentBlock")
"""Endings of class names of layers that cannot start from a state: MiniMax, Mamba-1, Griffin."""
UNUSED = ("attention_mask", "cache_params", "past_key_values")
"""Arguments of a layer that are None in a call over rows."""
OF_PACKS = (*UNUSED, "packing", "seq_idx", "cu_seq_lens_q")


# ── rows ─────────────────────────────────────────────────────────────────────

Span = tuple[int, int]
"""Index of the first token in the pack, and number of tokens."""


@dataclass
class RowClass:
    """B rows, padded to L tokens, that a layer computes in one batch."""

    gather: torch.Tensor
    """int64 [B * L]: index of the token in each slot; padding slots repeat a row's first token."""
    sequences: int
    """The number of rows, B."""
    read: torch.Tensor
    """int64 [n]: slots whose outputs are used."""
    tokens: torch.Tensor
    """int64 [n]: index of the token in each of these slots."""
    starts: torch.Tensor | None
    """int64 [B]: index, among the states passed on so far, of the state from which each row starts; None for zeros."""
    hands: bool
    """True if the rows' last states are passed on; these get the next indices, in the order of the rows."""


@dataclass
class Rows:
    """All rows of a pack, in an order in which states are computed before they are used."""

    classes: list[RowClass]
    order: torch.Tensor
    """int64 [T]: index of each token in the concatenated outputs of the classes."""


def rows_of(packing: Packing, hand: bool) -> Rows:
    """Return the rows of a pack, computed once per forward. hand: rows may start from the states of others."""
    if hand not in packing.rows:
        packing.rows[hand] = _plan(packing, hand)
    return packing.rows[hand]


def _plan(packing: Packing, hand: bool) -> Rows:
    own = [spans[-1] for spans in packing.spans]
    followed = set(packing.parents)
    spans: list[list[Span]] = []  # for each node: spans of the row that ends with it
    source: list[int] = []  # the node from whose state that row starts, -1 for zeros
    handing: list[bool] = []
    depth: list[int] = []  # number of states in sequence that must be computed before
    for node, parent in enumerate(packing.parents):
        takes = parent >= 0 and handing[parent]
        spans.append([own[node]] if takes or parent < 0 else [*spans[parent], own[node]])
        source.append(parent if takes else source[parent] if parent >= 0 else -1)
        depth.append(depth[source[node]] + 1 if source[node] >= 0 else 0)
        # After a state, transformers treats a single token as a generation step.
        handing.append(hand and node in followed and sum(n for _, n in spans[node]) > 1)
    classes: list[RowClass] = []
    number: dict[int, int] = {}
    seen: set[Span] = set()
    # A node with children that does not pass on its state is computed in the row of its first child.
    ends = [node for node in range(len(own)) if handing[node] or node not in followed]
    for level in range(max(depth) + 1):
        for hands, groups in ((True, grouped), (False, alike)):
            members = [node for node in ends if depth[node] == level and handing[node] == hands]
            sizes = [sum(n for _, n in spans[node]) for node in members]
            for group in groups(sizes) if members else []:
                nodes = [members[i] for i in group]
                starts = [number[source[node]] for node in nodes] if level else None
                classes.append(_row_class([spans[node] for node in nodes], seen, starts, hands, packing.device))
                if hands:
                    number |= {node: len(number) + i for i, node in enumerate(nodes)}
    return Rows(classes, torch.argsort(torch.cat([c.tokens for c in classes])))


def _row_class(
    rows: list[list[Span]], seen: set[Span], starts: list[int] | None, hands: bool, device: torch.device
) -> RowClass:
    """Return a batch of rows. seen: spans whose outputs other rows provide; the spans of these rows are added to it."""
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
        gather.flatten().to(device),
        len(rows),
        torch.nonzero(counts.flatten()).flatten().to(device),
        gather[counts].to(device),
        None if starts is None else torch.tensor(starts, device=device),
        hands,
    )


# ── layers ───────────────────────────────────────────────────────────────────


class State:
    """A transformers cache for one layer and one call, through which gradients of states can flow."""

    record_past = False

    def __init__(self, start: "dict[str, torch.Tensor] | None"):
        """start: states `conv` [B, C, k - 1] and, for layers that have one, `recurrent`; None for zeros."""
        self.start, self.last = start, {}

    @property
    def layers(self) -> Any:
        """The layers of the cache by index; every index returns this object."""
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[torch.Tensor]:
        """The convolution's states, as in transformers' cache of a layer."""
        return [self.start["conv"]] if self.start else []

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """The recurrent states, as in transformers' cache of a layer."""
        return [self.start.get("recurrent")] if self.start else [None]

    def has_previous_state(self, *_, **__) -> bool:
        """Return True if the layer starts from a state."""
        return self.start is not None

    def update_conv_state(self, x_BCL: torch.Tensor, *_, conv_kernel_size: int, **__) -> torch.Tensor:
        """Return the inputs of a convolution, preceded by the k - 1 inputs before them; store the last k - 1."""
        k = conv_kernel_size
        before = self.start["conv"] if self.start else x_BCL.new_zeros(*x_BCL.shape[:2], k - 1)
        whole = torch.cat([before, x_BCL], -1)
        self.last["conv"] = whole[..., whole.shape[-1] - k + 1 :]
        return whole

    def update_recurrent_state(self, state: torch.Tensor, *_, **__) -> torch.Tensor:
        """Store and return the state after the last token."""
        self.last["recurrent"] = state
        return state


def install(hf: nn.Module) -> None:
    """Make the layers of a HF model run over packs while a packing is `active`; otherwise they run unchanged."""
    for module in hf.modules():
        mixes = type(module).__name__.endswith((*CARRIERS, *OTHERS))
        if mixes and getattr(module.forward, "func", None) is not _forward:
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
        # Right padding needs no mask.
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
    """Limit Mamba-2's chunk size on a CPU to about the length of the rows; it affects results only by rounding.

    In plain torch, the cost of a chunk is quadratic in its size, padding included.
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
    """Rearrange values of tokens into rows, [1, T, ...] -> [B, L, ...]; return other values unchanged."""
    if isinstance(value, tuple):
        return tuple(_lay_out(part, rows, packing) for part in value)
    if torch.is_tensor(value) and value.dim() > 1 and value.shape[:2] == (1, packing.part.tokens):
        return value[0].index_select(0, rows.gather).unflatten(0, (rows.sequences, -1))
    return value
