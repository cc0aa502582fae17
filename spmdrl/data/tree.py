"""Shared prompts: the samples of a group as a tree, their prompt's tokens once, each sample a branch on it.

A pack [T] holds every sample whole, prompt and response end to end. The transformer runs on the tree's tokens [R]
instead: what the samples of a prompt have in common is computed once, and its gradient is the sum over the samples by
itself. The states are handed out again to the tokens of the pack, so heads and losses know nothing of this.

B: sequences of the pack; G: trunks, the distinct prompts. The trunk of a sequence is all that stands before its first
sampled token.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class Tree:
    """How the tokens of a pack stand in its tree. All on the host."""

    keep: torch.Tensor
    """int64 [R]: token of the pack at each row of the tree: of each trunk, its first sequence's; then all branches."""
    place: torch.Tensor
    """int64 [T]: row of the tree that holds each token of the pack."""
    positions: torch.Tensor
    """int64 [R]: position of each row in its sequence."""
    trunk_lengths: list[int]
    """[G]: tokens."""
    branch_lengths: list[int]
    """[B]: tokens; the branches of a trunk stand next to each other."""
    trunk_of: list[int]
    """[B]: the trunk of each branch."""


def prompt_lengths(lengths_B: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """int64 [B]: tokens before each sequence's first sampled one; its length where there is none."""
    seq_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    inside_T = torch.arange(len(mask_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[seq_T]
    return lengths_B.scatter_reduce(0, seq_T[mask_T], inside_T[mask_T], "amin")


def trunks(
    tokens_T: torch.Tensor, lengths_B: torch.Tensor, mask_T: torch.Tensor, experts_T: torch.Tensor | None = None
) -> tuple[list[int], list[int]]:
    """([B] the trunk of each sequence, numbered from 0; [B] its length). Only neighbours share a trunk.

    A sequence without a sampled token is all trunk but its last token, so that every sequence has a branch.
    experts_T: [T, ...] where routing is replayed; then a trunk's tokens go to the same experts too.
    """
    columns_T = [tokens_T] if experts_T is None else [tokens_T, experts_T]
    starts, lengths = (torch.cumsum(lengths_B, 0) - lengths_B).tolist(), lengths_B.tolist()
    first_B = prompt_lengths(lengths_B, mask_T).tolist()
    trunk_of: list[int] = []
    sizes: list[int] = []
    leader = 0
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        size = min(first_B[i], length - 1)
        same = (
            i > 0
            and size == sizes[leader]
            and all(torch.equal(x[start : start + size], x[starts[leader] : starts[leader] + size]) for x in columns_T)
        )
        if not same:
            leader = i
        trunk_of.append(trunk_of[-1] + (not same) if trunk_of else 0)
        sizes.append(size)
    return trunk_of, sizes


def plan_tree(
    tokens_T: torch.Tensor, lengths_B: torch.Tensor, mask_T: torch.Tensor, experts_T: torch.Tensor | None = None
) -> Tree | None:
    """The tree of a pack; None where no two neighbours have a prompt in common. Host tensors; see `trunks`."""
    trunk_of, sizes = trunks(tokens_T, lengths_B, mask_T, experts_T)
    count = trunk_of[-1] + 1 if trunk_of else 0
    if count == len(trunk_of):
        return None
    lengths = lengths_B.tolist()
    starts = (torch.cumsum(lengths_B, 0) - lengths_B).tolist()
    leaders = [i for i, g in enumerate(trunk_of) if i == 0 or g != trunk_of[i - 1]]
    trunk_lengths = [sizes[i] for i in leaders]
    branch_lengths = [n - size for n, size in zip(lengths, sizes, strict=True)]
    trunk_starts = [0, *accumulate(trunk_lengths)]
    row = sum(trunk_lengths)
    keep = [torch.arange(starts[i], starts[i] + sizes[i]) for i in leaders]
    positions = [torch.arange(n) for n in trunk_lengths]
    place = []
    for i, (start, size, branch) in enumerate(zip(starts, sizes, branch_lengths, strict=True)):
        first = trunk_starts[trunk_of[i]]
        place += [torch.arange(first, first + size), torch.arange(row, row + branch)]
        keep.append(torch.arange(start + size, start + size + branch))
        positions.append(torch.arange(size, size + branch))
        row += branch
    return Tree(torch.cat(keep), torch.cat(place), torch.cat(positions), trunk_lengths, branch_lengths, trunk_of)
