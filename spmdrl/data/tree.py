"""Shared prompts: the samples of a group as a tree, their prompt's tokens once, each sample a branch on it.

A pack [T] holds every sample whole, prompt and response end to end. The transformer runs on the tree's tokens [R]
instead: the tokens that the samples of a prompt share are computed once, and autograd sums their gradient over the
samples. The states are then copied back to the tokens of the pack, so heads and losses need not know of the tree.

B: sequences of the pack; G: trunks, the distinct prompts. The trunk of a sequence is all tokens before its first
sampled one.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class Tree:
    """The mapping between the tokens of a pack and those of its tree. All on the host."""

    keep: torch.Tensor
    """int64 [R]: token of the pack at each row of the tree: of each trunk, its first sequence's; then all branches."""
    place: torch.Tensor
    """int64 [T]: row of the tree that holds each token of the pack."""
    positions: torch.Tensor
    """int64 [R]: position of each row in its sequence."""
    trunk_lengths: list[int]
    """[G]: number of tokens of each trunk."""
    branch_lengths: list[int]
    """[B]: number of tokens of each branch; the branches of a trunk are adjacent."""
    trunk_of: list[int]
    """[B]: the trunk of each branch."""


def prompt_lengths(lengths_B: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Count the tokens before each sequence's first sampled one, int64 [B]; its length if none is sampled."""
    seq_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    inside_T = torch.arange(len(mask_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[seq_T]
    return lengths_B.scatter_reduce(0, seq_T[mask_T], inside_T[mask_T], "amin")


def trunks(
    tokens_T: torch.Tensor, lengths_B: torch.Tensor, mask_T: torch.Tensor, experts_T: torch.Tensor | None = None
) -> tuple[list[int], list[int]]:
    """Return ([B] the trunk of each sequence, numbered from 0; [B] its length). Only neighbours share a trunk.

    A sequence without a sampled token is all trunk but its last token, so that every sequence has a branch.
    experts_T: [T, ...] under routing replay; tokens of a shared trunk must then have the same experts too.
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
    """Plan the tree of a pack; None if no two neighbours share a prompt. Takes host tensors; see `trunks`."""
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
