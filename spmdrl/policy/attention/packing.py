"""Divides the T tokens on which a transformer runs into sequences, or into the nodes of a tree (`data/tree.py`).

A pack has several layouts, each computed at first use: concatenated sequences without padding for the kernels of
`varlen.py`, batches of sequences of similar length with padding for all other attention (`packed.py`), and rows for
recurrent layers (`mixers/layers.py`). They are computed in host memory, and kept there for later passes over the pack.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.policy.attention.varlen import Runs, make_runs
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.devices import kind_of

SHORT = 16
"""Sequences of at most this many tokens are all in the same length class."""


@dataclass
class LengthClass:
    """B sequences (or nodes of a tree) of similar length, padded to B rows of L places, which are called slots.

    A node also attends to the tokens of its ancestors, which are called its trunk.
    """

    gather: torch.Tensor
    """int64 [B * L]: index in the pack of the token in each slot; padding slots repeat the sequence's first token."""
    scatter: torch.Tensor
    """int64 [tokens]: the slot of each token of the class, without padding."""
    tokens: torch.Tensor
    """int64 [tokens]: index in the pack of each token of the class."""
    sequences: int
    longest: int
    keys: torch.Tensor
    """int64 [B * (P + L)]: index in the pack of the token in each slot of keys. A node has P slots for its trunk, with
    padding at their beginning, and then its own L slots."""
    trunk: int = 0
    """P, the largest number of tokens of a trunk; 0 for complete sequences."""
    trunks: torch.Tensor | None = None
    """int64 [B]: number of tokens of each trunk; None if all trunks have P tokens."""


@dataclass
class Packing:
    """The division of T packed tokens into sequences or nodes, made for each forward and used by every layer."""

    lengths: list[int]
    """Number of tokens of each node, in the order of the T tokens. Without shared tokens, a node is a sequence."""
    parents: list[int]
    """Index of the parent of each node of a tree (`data/tree.py`); -1 for roots, which come first."""
    device: torch.device
    kind: str
    """The value of `--policy.attention`, which selects the kernel of attention layers."""
    part: TokenSlice
    """The slice of the tokens that this rank's layers process; only attention runs over all tokens."""
    experts: torch.Tensor | None = None
    """[S, layers, K] for the tokens of `part`: the experts that routers must choose (`hub/routing.py`); None: no
    replay."""
    computed: dict[Hashable, Any] = field(default_factory=dict)
    """The layouts that were computed so far, in host memory; passes over the same pack share them."""
    copied: dict[Hashable, Any] = field(default_factory=dict)
    """The layouts on the device."""

    def layout(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a layout on the device. compute: computes it in host memory, at the first use."""
        if name not in self.copied:
            if name not in self.computed:
                self.computed[name] = compute()
            self.copied[name] = to_device(self.computed[name], self.device)
        return self.copied[name]

    @property
    def runs(self) -> Runs:
        """The layout for kernels over concatenated sequences; a node's keys include those of its ancestors."""
        spans = None if self.roots == len(self.lengths) else self.spans
        return self.layout("runs", lambda: make_runs(self.lengths, spans))

    @property
    def runs_with_sink(self) -> Runs:
        """The layout `runs`, with the sink key, whose index is T, before the keys of each node."""
        sink = (sum(self.lengths), 1)
        return self.layout("sink", lambda: make_runs(self.lengths, [[sink, *spans] for spans in self.spans]))

    @property
    def classes(self) -> list[LengthClass]:
        """The layout for attention over padded sequences, one class for each group of similar lengths (`alike`)."""
        return self.layout("classes", self._in_classes)[0]

    @property
    def order(self) -> torch.Tensor:
        """int64 [T]: position of the output for each packed token in the concatenated outputs of the classes."""
        return self.layout("classes", self._in_classes)[1]

    def _in_classes(self) -> tuple[list[LengthClass], torch.Tensor]:
        below, starts = [spans[:-1] for spans in self.spans], _starts(self.lengths)
        # If all trunks of a class have the same length, a GPU needs only a causal mask that is aligned to the last key.
        exact = kind_of(self.device) == "cuda"
        parts = slice(0, self.roots), slice(self.roots, None)
        found = [c for x in parts for c in _classes(below[x], starts[x], self.lengths[x], exact)]
        return found, torch.argsort(torch.cat([c.tokens for c in found]))

    @property
    def roots(self) -> int:
        """The number of nodes without a parent."""
        return self.parents.count(-1)

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """The spans (first token, number of tokens) to which each node attends, from the root to the node."""
        own = list(zip(_starts(self.lengths), self.lengths, strict=True))
        out: list[list[tuple[int, int]]] = []
        for node in range(len(own)):
            chain, at = [], node
            while at >= 0:
                chain.append(own[at])
                at = self.parents[at]
            out.append(chain[::-1])
        return out


def _starts(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def alike(lengths: list[int]) -> list[list[int]]:
    """Group the indices of similar lengths.

    All lengths form one group if at most a fifth of its slots would be padding. If not, the lengths from one power of 2
    to the next form up to two groups.
    """
    uneven = sum(lengths) * 5 < max(lengths) * len(lengths) * 4
    # Lengths below SHORT count as SHORT, because padding short sequences costs less than a call for each length.
    return grouped([(max(n, SHORT) ** 2).bit_length() if uneven else 0 for n in lengths])


def grouped(marks: list[int]) -> list[list[int]]:
    """Group the indices of equal marks; groups are in the order in which their marks first appear."""
    groups: dict[int, list[int]] = {}
    for i, mark in enumerate(marks):
        groups.setdefault(mark, []).append(i)
    return list(groups.values())


def padded(starts: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (index of the token in each slot [B, L], bool [B, L] that is False on padding, L).

    starts, lengths: first token and number of tokens of each of B sequences.
    """
    width = max(lengths)
    begin, size = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    slot = torch.arange(width)[None]
    real = slot < size
    return torch.where(real, begin + slot, begin), real, width


def _classes(
    below: list[list[tuple[int, int]]], starts: list[int], lengths: list[int], exact: bool
) -> list[LengthClass]:
    """Return the length classes of nodes; a node without ancestors is treated as a complete sequence.

    below: for each node, the spans (first token, number of tokens) of its trunk. starts, lengths: first token and
    number of tokens of each node. exact: require that all trunks of a class have the same length.
    """
    alike_trunks = grouped if exact else alike
    trunks = [sum(n for _, n in spans) for spans in below]
    out = []
    for like in alike(lengths) if lengths else []:
        for same in alike_trunks([trunks[i] for i in like]):
            members = [like[i] for i in same]
            gather, real, width = padded([starts[i] for i in members], [lengths[i] for i in members])
            scatter = torch.nonzero(real.flatten()).flatten()
            sizes = torch.tensor([trunks[i] for i in members])
            slots = keys = gather.flatten()
            if trunk := int(sizes.max()):
                # A trunk ends at slot P, so that its last token directly precedes its node.
                back = (torch.arange(trunk)[None] - (trunk - sizes[:, None])).clamp(min=0)
                rows = [torch.cat([torch.arange(first, first + n) for first, n in below[i]]) for i in members]
                ahead = torch.stack([row[slot] for row, slot in zip(rows, back, strict=True)])
                keys = torch.cat([ahead, gather], 1).flatten()
            uneven = None if bool((sizes == trunk).all()) else sizes
            out.append(LengthClass(slots, scatter, gather[real], len(members), width, keys, trunk, uneven))
    return out


_PACKING: ContextVar[Packing | None] = ContextVar("packing", default=None)


def active() -> Packing | None:
    """Return the packing of the current forward; None if the model runs without one.

    Layers other than attention use this function, because many families pass them only a few named arguments.
    Attention gets the packing as a keyword argument.
    """
    return _PACKING.get()


@contextmanager
def over(packing: Packing | None) -> Iterator[None]:
    """Make `active` return this packing inside this context, so that a model's layers run over it."""
    token = _PACKING.set(packing)
    try:
        yield
    finally:
        _PACKING.reset(token)


def again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return two contexts, for a checkpointed forward and its recomputation, in which the packing is the same.

    This is a `context_fn` of torch's checkpoint. The recomputation runs in the backward, after the forward's context
    has ended and perhaps on another thread.
    """
    return nullcontext(), over(active())
