"""Plans the forward pass of a packed micro-batch in host memory, to avoid device synchronisation in the pass.

FSDP moves all tensor arguments of a model to the device, even those that only the host reads. A plan is an opaque
object, so its tensors stay on the host.

Shapes: T tokens in the packed batch, S tokens in this rank's slice (shared tokens counted once), n tokens in the loss
mask whose states are in this slice.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spmdrl.data.batch import Batch
from spmdrl.data.tree import plan_tree
from spmdrl.hub.encode import NOTHING, Seen
from spmdrl.hub.routing import FREE
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.policy.vision import seen_in
from spmdrl.spmd.payload import Payload
from spmdrl.spmd.seeds import uniform

Plan = TypeVar("Plan")


@dataclass
class HeadRows:
    """The tokens in the loss mask that this rank's head processes."""

    rows: torch.Tensor
    """int64 [n]: index of each token in the packed batch."""
    states: torch.Tensor
    """int64 [n]: index of each token's hidden state within this rank's slice."""
    targets: torch.Tensor
    """int64 [n]: token ids."""


@dataclass
class ForwardPlan:
    """Everything that a forward pass reads from the host. All passes over the same micro-batch share one plan."""

    tokens: int
    """Number of tokens in the packed batch, T."""
    lengths: list[int]
    """Number of tokens in each node, as `Packing.lengths`."""
    parents: list[int]
    """The parent of each node, as `Packing.parents`."""
    part: TokenSlice
    """This rank's slice of the tokens that the transformer processes."""
    ids_S: torch.Tensor
    """int64 [S]: token ids in the slice."""
    positions_S: torch.Tensor
    """int64 [S]: position of each token in its sequences, or [S, 3] with positions along time, row and column."""
    head: HeadRows
    experts_SLK: torch.Tensor | None = None
    """Experts to route to (`Packing.experts`), or None without routing replay."""
    images: list[tuple[Payload, ...]] | None = None
    """The images of each sequence, or None without images."""
    seen: Seen = NOTHING
    """The images that the pass reads."""
    layouts: dict[Hashable, Any] = field(default_factory=dict)
    """Cached layouts, as `Packing.computed`."""


def plan_forward(
    tokens_T: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_T: torch.Tensor,
    before: bool,
    group: dist.ProcessGroup | None = None,
    shares: bool = False,
    begins_B: torch.Tensor | None = None,
    experts_TLK: torch.Tensor | None = None,
    images: list[tuple[Payload, ...]] | None = None,
    mark_T: torch.Tensor | None = None,
    positions_T3: torch.Tensor | None = None,
) -> ForwardPlan:
    """Plan the forward pass of a packed batch. All tensors are in host memory.

    tokens_T: int64 [T]; lengths_B: int64 [B]; mask_T: bool [T]. before: whether the head reads the hidden state that
    predicts a token instead of the one at the token. group: ranks that split the packed batch. shares: compute shared
    tokens once. begins_B: bool [B], False for a sequence that is another path of the previous sequence's episode
    (`data/tree.py`), or None if every episode has one path. experts_TLK: [T, L, K], experts to route to, where -1
    (FREE) leaves the choice to the router (`hub/routing.py`). images: the images of each sequence, with their marks
    (`data/placeholders.py`), or None without images. positions_T3: `vision.positions_of`.
    """
    rows, ids = torch.nonzero(mask_T).flatten(), tokens_T
    tree = plan_tree(tokens_T, lengths_B, mask_T, begins_B, experts_TLK, mark_T) if shares else None
    if tree is None:
        lengths = lengths_B.tolist()
        parents, states = [-1] * len(lengths), rows - int(before)
        positions = torch.cat([torch.arange(n) for n in lengths]) if positions_T3 is None else positions_T3
    else:
        lengths, parents = tree.lengths, tree.parents
        positions = tree.positions if positions_T3 is None else positions_T3[tree.keep]
        states, ids = tree.place[rows - int(before)], tokens_T[tree.keep]
        experts_TLK = None if experts_TLK is None else experts_TLK[tree.keep]
    part = TokenSlice(sum(lengths), group)
    here, at = part.within(states)
    rows = rows[here]
    head = HeadRows(rows, at, tokens_T[rows])
    # `mine` pads with 0, so shift by FREE to make the padding FREE: routers then choose the experts of padding tokens.
    experts = None if experts_TLK is None else part.mine(experts_TLK - FREE) + FREE
    plan = ForwardPlan(len(tokens_T), lengths, parents, part, part.mine(ids), part.mine(positions), head, experts)
    if images is not None:
        assert mark_T is not None
        plan.images, plan.seen = images, seen_in(images, mark_T, None if tree is None else tree.place, part)
    return plan


def kept_plan(batch: Batch, key: Hashable, make: Callable[[], Plan]) -> Plan:
    """Return the plan cached in a batch under `key`, or make and cache a new one."""
    found, mask_T = batch.plans.get(key), batch.token["mask"]
    # The mask can change between the passes of a step, because truncated responses may be excluded from training
    # (`Algorithm.mask_cut`).
    if found is None or not torch.equal(found[0], mask_T):
        found = batch.plans[key] = mask_T, make()
    return found[1]


def check_ids(tokens_T: torch.Tensor, vocabulary: int) -> None:
    """Raise ValueError unless all token ids (in host memory) are in [0, vocabulary)."""
    low, high = (int(x) for x in torch.aminmax(tokens_T))
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"tokens must lie in [0, {vocabulary}), got values from {low} to {high}: "
            "the tokenizer has tokens that the model lacks"
        )


FORWARD = ("experts", "noise", "noise_scale", "image")
"""Token columns that only the forward pass reads."""


def for_losses(micro: Batch, device: torch.device) -> Batch:
    """Return a micro-batch on the device, without the columns that only the forward pass reads."""
    columns = {name: x for name, x in micro.token.items() if name not in FORWARD}
    return Batch(micro.lengths, columns, micro.seq).to(device)


Noise = tuple[torch.Tensor, torch.Tensor]
"""Embedding noise: per-token seeds, int64 [T], and per-token scales, [T]. The noise of a token is uniform in ±scale /
sqrt(embedding dimension)."""


def noise_of(noise: Noise, part: TokenSlice, like: torch.Tensor) -> torch.Tensor:
    """Return uniform noise for the embeddings [1, n, D] of a slice, as in NEFTune (https://arxiv.org/abs/2310.05914).

    The noise of a token depends only on its seed and scale, so it is the same in every layout.
    """
    seed_T, scale_T = (part.mine(x) for x in noise)
    width = torch.arange(like.shape[-1], device=like.device)
    drawn = uniform(seed_T[:, None], width[None]) * 2 - 1
    return (drawn * scale_T.double()[:, None] / like.shape[-1] ** 0.5).to(like.dtype)[None]
