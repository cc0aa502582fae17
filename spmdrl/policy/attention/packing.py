"""Describes how T packed tokens are split into sequences, or into the nodes of a tree (`data/tree.py`).

A packed batch has several layouts, each computed on first use: concatenated sequences without padding for the kernels
in `varlen.py`, padded batches of sequences of similar length for all other attention (`packed.py`), and rows for
recurrent layers (`mixers/layers.py`). All layouts are computed in host memory and cached there for later passes.
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
"""Sequences with up to this many tokens share one length class."""


@dataclass
class LengthClass:
    """B sequences (or tree nodes) of similar length, padded to B rows of L slots.

    A node also attends to the tokens of its ancestors, called its trunk.
    """

    gather: torch.Tensor
    """int64 [B * L]: packed index of the token in each slot; padding slots repeat the first token of the sequence."""
    scatter: torch.Tensor
    """int64 [tokens]: slot of each token in the class, without padding."""
    tokens: torch.Tensor
    """int64 [tokens]: packed index of each token in the class."""
    sequences: int
    longest: int
    keys: torch.Tensor
    """int64 [B * (P + L)]: packed index of the token in each key slot. A node has P slots for its trunk, padded on the
    left, followed by its own L slots."""
    trunk: int = 0
    """P, the maximum trunk length in tokens; 0 for complete sequences."""
    trunks: torch.Tensor | None = None
    """int64 [B]: number of tokens in each trunk, or None if all trunks have P tokens."""


@dataclass
class Packing:
    """How T packed tokens are split into sequences or nodes; created per forward pass and used by every layer."""

    lengths: list[int]
    """Number of tokens in each node, in token order. Without shared tokens, every node is a sequence."""
    parents: list[int]
    """Parent index of each tree node (`data/tree.py`); -1 for roots, which come first."""
    device: torch.device
    kind: str
    """Value of `--policy.attention`, which selects the attention kernel."""
    part: TokenSlice
    """Slice of the tokens that this rank's layers process; only attention runs over all tokens."""
    experts: torch.Tensor | None = None
    """[S, layers, K]: experts to route the tokens of `part` to (`hub/routing.py`), or None without routing replay."""
    computed: dict[Hashable, Any] = field(default_factory=dict)
    """Layouts computed so far, in host memory, shared by all passes over the same packed batch."""
    copied: dict[Hashable, Any] = field(default_factory=dict)
    """Device copies of the layouts."""

    def layout(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a layout on the device. compute: callback that computes it in host memory, called on first use."""
        if name not in self.copied:
            if name not in self.computed:
                self.computed[name] = compute()
            self.copied[name] = to_device(self.computed[name], self.device)
        return self.copied[name]

    @property
    def runs(self) -> Runs:
        """The layout for varlen kernels; the keys of a node include those of its ancestors."""
        spans = None if self.roots == len(self.lengths) else self.spans
        return self.layout("runs", lambda: make_runs(self.lengths, spans))

    @property
    def runs_with_sink(self) -> Runs:
        """Like `runs`, but with the sink key (index T) before the keys of each node."""
        sink = (sum(self.lengths), 1)
        return self.layout("sink", lambda: make_runs(self.lengths, [[sink, *spans] for spans in self.spans]))

    @property
    def classes(self) -> list[LengthClass]:
        """The layout for padded attention, with one class per group of similar lengths (`alike`)."""
        return self.layout("classes", self._in_classes)[0]

    @property
    def order(self) -> torch.Tensor:
        """int64 [T]: index of each packed token's output in the concatenated outputs of all classes."""
        return self.layout("classes", self._in_classes)[1]

    def _in_classes(self) -> tuple[list[LengthClass], torch.Tensor]:
        below, starts = [spans[:-1] for spans in self.spans], _starts(self.lengths)
        # If all trunks in a class have the same length, a bottom-right causal mask is enough on GPUs.
        exact = kind_of(self.device) == "cuda"
        parts = slice(0, self.roots), slice(self.roots, None)
        found = [c for x in parts for c in _classes(below[x], starts[x], self.lengths[x], exact)]
        return found, torch.argsort(torch.cat([c.tokens for c in found]))

    @property
    def roots(self) -> int:
        """Number of nodes without a parent."""
        return self.parents.count(-1)

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """The spans (first token, number of tokens) that each node attends to, from the root to the node."""
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
    """Group indices by similar length.

    Returns a single group if at most a fifth of its slots would be padding. Otherwise, there are up to two groups per
    power of 2.
    """
    uneven = sum(lengths) * 5 < max(lengths) * len(lengths) * 4
    # Treat lengths below SHORT as SHORT, because padding short sequences is cheaper than more kernel calls.
    return grouped([(max(n, SHORT) ** 2).bit_length() if uneven else 0 for n in lengths])


def grouped(marks: list[int]) -> list[list[int]]:
    """Group the indices of equal marks, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for i, mark in enumerate(marks):
        groups.setdefault(mark, []).append(i)
    return list(groups.values())


def padded(starts: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the token index of each slot, [B, L], a bool mask [B, L] that is False on padding, and L.

    starts, lengths: index of each sequence's first token, and each sequence's number of tokens.
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

    below: spans (first token, number of tokens) of each node's trunk. starts, lengths: first token and number of tokens
    of each node. exact: True if all trunks in a class must have the same length.
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
                # Align trunks to slot P, so that the last token of a trunk directly precedes its node.
                back = (torch.arange(trunk)[None] - (trunk - sizes[:, None])).clamp(min=0)
                rows = [torch.cat([torch.arange(first, first + n) for first, n in below[i]]) for i in members]
                ahead = torch.stack([row[slot] for row, slot in zip(rows, back, strict=True)])
                keys = torch.cat([ahead, gather], 1).flatten()
            uneven = None if bool((sizes == trunk).all()) else sizes
            out.append(LengthClass(slots, scatter, gather[real], len(members), width, keys, trunk, uneven))
    return out


_PACKING: ContextVar[Packing | None] = ContextVar("packing", default=None)


def active() -> Packing | None:
    """Return the packing of the current forward pass, or None if there is none.

    This is for layers other than attention, because many model families only pass them a few named arguments. Attention
    gets the packing as a keyword argument.
    """
    return _PACKING.get()


@contextmanager
def over(packing: Packing | None) -> Iterator[None]:
    """Make `active` return this packing inside this context, so that layers use it."""
    token = _PACKING.set(packing)
    try:
        yield
    finally:
        _PACKING.reset(token)


def again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return contexts for a checkpointed forward and its recomputation, with the same active packing.

    This is a `context_fn` for torch's checkpoint. Recomputation happens during backward, after the forward's context
    has exited and possibly on another thread.
    """
    return nullcontext(), over(active())
