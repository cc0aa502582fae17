"""A tree of shared tokens, which contains the common prefix of a prompt's samples or an episode's paths only once.

A packed batch [T] contains all sequences in full, concatenated. The transformer runs on the tree's tokens [R] instead:
tokens shared by sequences are computed once, and autograd sums their gradients over the sequences. The hidden states
are then copied back to the packed tokens, so heads and losses are independent of the tree.

B: number of packed sequences. N: number of tree nodes. A node is a range of tokens shared by the same sequences; each
token attends to itself, to earlier tokens of its node and to the node's ancestors. The samples of a prompt share all
tokens before their first sampled one, if all of these are equal. The paths of an episode share their longest common
prefix. Placeholder tokens are equal only if they stand for the same image, and an image is shared as a whole or not at
all.
"""

from dataclasses import dataclass

import torch

from spmdrl.data.placeholders import whole
from spmdrl.data.segment import shared_length


@dataclass
class Tree:
    """Mapping between the tokens of a packed batch and those of its tree. All tensors are on the host."""

    keep: torch.Tensor
    """int64 [R]: each tree token's index in the packed batch. The tokens of all roots come first."""
    place: torch.Tensor
    """int64 [T]: each packed token's index in the tree."""
    positions: torch.Tensor
    """int64 [R]: each tree token's position in the sequences that share it."""
    lengths: list[int]
    """[N]: number of tokens per node, at least 1. Nodes are contiguous in the tree, roots first."""
    parents: list[int]
    """[N]: the parent of each node, or -1 for a root."""


@dataclass
class Shared:
    """The prefix that each packed sequence shares with an earlier one."""

    source: list[int]
    """[B]: index of the earlier sequence with the shared prefix, or the sequence's own index if there is none."""
    tokens: list[int]
    """[B]: number of leading tokens shared with the source sequence, less than this sequence's length."""
    prompts: list[int]
    """[B]: number of tokens that another sample of the same prompt would share with this sequence, or 0 for all but the
    first path of an episode."""


def prompt_lengths(lengths_B: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Count the tokens before each sequence's first sampled token, int64 [B], or all tokens if none is sampled."""
    seq_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    inside_T = torch.arange(len(mask_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[seq_T]
    return lengths_B.scatter_reduce(0, seq_T[mask_T], inside_T[mask_T], "amin")


def shared_tokens(
    tokens_T: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_T: torch.Tensor,
    begins_B: torch.Tensor | None = None,
    experts_T: torch.Tensor | None = None,
    images_T: torch.Tensor | None = None,
) -> Shared:
    """Find the prefix that each sequence shares with an earlier one. Takes host tensors.

    Only consecutive episodes share a prompt, and the last token of a sequence is never shared.

    tokens_T: int64 [T]. lengths_B: int64 [B]. mask_T: bool [T]. begins_B: bool [B], True for the first path of an
    episode (`Batch.begins`); None if each sequence is an episode. experts_T: [T, ...] under routing replay; shared
    tokens must then have the same experts, too. images_T: int64 [T], marks of images (`data/placeholders.py`), or None
    without images.
    """
    columns = [x for x in (tokens_T, experts_T, images_T) if x is not None]
    lengths, first_B = lengths_B.tolist(), prompt_lengths(lengths_B, mask_T).tolist()
    rows = [x.split(lengths) for x in columns]
    marks = None if images_T is None else rows[-1]
    begins = [True] * len(lengths) if begins_B is None else begins_B.tolist()
    found = Shared([], [], [])
    leader = begin = 0
    for i, length in enumerate(lengths):
        source, tokens, prompt = i, 0, 0
        if begins[i]:
            begin, prompt = i, min(first_B[i], length - 1)
            prompt = prompt if marks is None else whole(prompt, marks[i])
            same = i > 0 and prompt == found.prompts[leader]
            if same and all(torch.equal(x[i][:prompt], x[leader][:prompt]) for x in rows):
                source, tokens = leader, prompt
            else:
                leader = i
        for other in range(begin, i):
            alike = min(length - 1, *(shared_length(x[i], x[other]) for x in rows))
            alike = alike if marks is None else whole(alike, marks[i])
            if alike > tokens:
                source, tokens = other, alike
        found.source.append(source)
        found.tokens.append(tokens)
        found.prompts.append(prompt)
    return found


def plan_tree(
    tokens_T: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_T: torch.Tensor,
    begins_B: torch.Tensor | None = None,
    experts_T: torch.Tensor | None = None,
    images_T: torch.Tensor | None = None,
) -> Tree | None:
    """Return the tree of a packed batch, or None if no sequences share tokens. Arguments as in `shared_tokens`."""
    shared = shared_tokens(tokens_T, lengths_B, mask_T, begins_B, experts_T, images_T)
    if not any(shared.tokens):
        return None
    lengths = lengths_B.tolist()
    # Each sequence adds the tokens after its shared ones, split where its prompt ends and where other sequences
    # diverge.
    cuts = [{n, prompt or n} for n, prompt in zip(shared.tokens, shared.prompts, strict=True)]
    owner = []
    for source, n in zip(shared.source, shared.tokens, strict=True):
        while n and n <= shared.tokens[source]:
            source = shared.source[source]
        owner.append(source)
        cuts[source].add(n)
    bounds = [sorted(cut | {end}) for cut, end in zip(cuts, lengths, strict=True)]
    pieces = [(i, at) for i, ends in enumerate(bounds) for at in range(len(ends) - 1)]
    pieces.sort(key=lambda piece: shared.tokens[piece[0]] > 0 or piece[1] > 0)
    number = {piece: node for node, piece in enumerate(pieces)}
    parents = []
    for i, at in pieces:
        if at:
            parents.append(number[i, at - 1])
        else:
            n = shared.tokens[i]
            parents.append(number[owner[i], bounds[owner[i]].index(n) - 1] if n else -1)
    spans = [(i, bounds[i][at], bounds[i][at + 1]) for i, at in pieces]
    sizes = [end - begin for _, begin, end in spans]
    starts = (torch.cumsum(lengths_B, 0) - lengths_B).tolist()
    keep = torch.cat([torch.arange(starts[i] + begin, starts[i] + end) for i, begin, end in spans])
    positions = torch.cat([torch.arange(begin, end) for _, begin, end in spans])
    row_of = torch.empty(len(tokens_T), dtype=torch.int64)
    row_of[keep] = torch.arange(len(keep))
    place = list(row_of.split(lengths))
    for i, (source, n) in enumerate(zip(shared.source, shared.tokens, strict=True)):
        place[i] = torch.cat([place[source][:n], place[i][n:]])
    return Tree(keep, torch.cat(place), positions, sizes, parents)
