"""Lays out a pack for layers that carry a state from token to token.

A row is one sequence, or a part of one that starts from the last state of an earlier row. Rows of similar length are
computed side by side, padded on the right, where padding changes no token before it.

In a tree (`data/tree.py`) a node with children is a row of its own, without padding, and passes its last state to them.
For layers that cannot pass on a state each row is a whole path from a root to a leaf, which is exact too and costs as
much as sequences that share nothing.
"""

from dataclasses import dataclass

import torch

from spmdrl.policy.attention.packing import Packing, alike, grouped, padded

Span = tuple[int, int]
"""First token in the pack, and the number of tokens."""


@dataclass
class RowClass:
    """B rows that a layer computes side by side."""

    gather: torch.Tensor
    """int64 [B * L]: token of each slot; padding repeats a row's first token."""
    sequences: int
    """B."""
    read: torch.Tensor
    """int64 [n]: slots whose outputs count."""
    tokens: torch.Tensor
    """int64 [n]: the tokens of these slots."""
    starts: torch.Tensor | None
    """int64 [B]: index of the state that each row starts from, among the states passed on; None for zeros."""
    hands: bool
    """True if the rows' last states are passed on; they get the next indices, in the order of the rows."""


@dataclass
class Rows:
    """All rows of a pack, ordered so that states are computed before they are used."""

    classes: list[RowClass]
    order: torch.Tensor
    """int64 [T]: place of each token in the classes' outputs laid end to end."""


def rows_of(packing: Packing, hand: bool) -> Rows:
    """Lay out a pack, once for all layers of a forward. hand: rows may start from the states of others."""
    if hand not in packing.rows:
        packing.rows[hand] = _plan(packing, hand)
    return packing.rows[hand]


def _plan(packing: Packing, hand: bool) -> Rows:
    own = [spans[-1] for spans in packing.spans]
    followed = set(packing.parents)
    spans: list[list[Span]] = []  # of the row that ends with this node
    source: list[int] = []  # the node whose state that row starts from, -1 for zeros
    handing: list[bool] = []
    depth: list[int] = []  # number of states that must be computed before
    for node, parent in enumerate(packing.parents):
        takes = parent >= 0 and handing[parent]
        spans.append([own[node]] if takes or parent < 0 else [*spans[parent], own[node]])
        source.append(parent if takes else source[parent] if parent >= 0 else -1)
        depth.append(depth[source[node]] + 1 if source[node] >= 0 else 0)
        # After a state transformers treats a single token as a step of generation.
        handing.append(hand and node in followed and sum(n for _, n in spans[node]) > 1)
    classes: list[RowClass] = []
    number: dict[int, int] = {}
    seen: set[Span] = set()
    # A node that passes on no state is computed in the row of its first child.
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
    """Lay rows out side by side. seen: spans whose outputs count elsewhere; those counted here are added."""
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
