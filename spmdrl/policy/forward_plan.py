"""Plans the forward of a packed micro-batch in host memory, so that no forward waits for the device.

FSDP copies all tensors in the arguments of a model to the device, even those that only the host reads. It does not look
into a plan, which is an object.

Shapes: T tokens of the pack, S tokens in this rank's slice of the tokens that run (shared ones only once), n tokens
under the mask whose states are in this slice.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spmdrl.data.batch import Batch
from spmdrl.data.tree import plan_tree
from spmdrl.hub.routing import FREE
from spmdrl.policy.attention.ulysses import TokenSlice

Plan = TypeVar("Plan")


@dataclass
class HeadRows:
    """The tokens under the loss mask for which this rank's head computes numbers."""

    rows: torch.Tensor
    """int64 [n]: index of each token in the pack."""
    states: torch.Tensor
    """int64 [n]: index of the hidden state that belongs to each token, among the states of this rank's slice."""
    targets: torch.Tensor
    """int64 [n]: id of each token."""


@dataclass
class ForwardPlan:
    """All that a forward of one micro-batch reads from the host. Passes over the same micro-batch share the plan."""

    tokens: int
    """Number of tokens of the pack, T."""
    lengths: list[int]
    """Number of tokens of each node, as `Packing.lengths`."""
    parents: list[int]
    """The parent of each node, as `Packing.parents`."""
    part: TokenSlice
    """This rank's slice of the tokens on which the transformer runs."""
    ids_S: torch.Tensor
    """int64 [S]: token ids of the slice."""
    positions_S: torch.Tensor
    """int64 [S]: the position of each token in the sequences that share it."""
    head: HeadRows
    experts_SLK: torch.Tensor | None = None
    """Experts that routers must choose (`Packing.experts`); None for no routing replay."""
    layouts: dict[Hashable, Any] = field(default_factory=dict)
    """The layouts of `Packing.computed`."""


def plan_forward(
    tokens_T: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_T: torch.Tensor,
    before: bool,
    group: dist.ProcessGroup | None = None,
    shares: bool = False,
    begins_B: torch.Tensor | None = None,
    experts_TLK: torch.Tensor | None = None,
) -> ForwardPlan:
    """Plan the forward of a pack. All tensors are in host memory.

    tokens_T: int64 [T]; lengths_B: int64 [B]; mask_T: bool [T]. before: whether the head gets the state before a token,
    which predicts it, instead of the state after it. group: ranks that divide the pack. shares: run shared tokens once.
    begins_B: bool [B], False for a sequence that is a further path of the previous sequence's episode
    (`data/tree.py`); None: no episode has several paths. experts_TLK: [T, L, K], experts that routers must choose; -1
    (FREE) lets the router choose (`hub/routing.py`).
    """
    rows, ids = torch.nonzero(mask_T).flatten(), tokens_T
    tree = plan_tree(tokens_T, lengths_B, mask_T, begins_B, experts_TLK) if shares else None
    if tree is None:
        lengths = lengths_B.tolist()
        parents, states = [-1] * len(lengths), rows - int(before)
        positions = torch.cat([torch.arange(n) for n in lengths])
    else:
        lengths, parents, positions = tree.lengths, tree.parents, tree.positions
        states, ids = tree.place[rows - int(before)], tokens_T[tree.keep]
        experts_TLK = None if experts_TLK is None else experts_TLK[tree.keep]
    part = TokenSlice(sum(lengths), group)
    here, at = part.within(states)
    rows = rows[here]
    head = HeadRows(rows, at, tokens_T[rows])
    # `mine` pads with 0. After the shift by FREE the padding is FREE, so routers choose the experts of padding.
    experts = None if experts_TLK is None else part.mine(experts_TLK - FREE) + FREE
    return ForwardPlan(len(tokens_T), lengths, parents, part, part.mine(ids), part.mine(positions), head, experts)


def kept_plan(batch: Batch, key: Hashable, make: Callable[[], Plan]) -> Plan:
    """Return the plan that an earlier pass over a batch stored under a key; make and store one if there is none."""
    found, mask_T = batch.plans.get(key), batch.token["mask"]
    # The mask may change between the passes of a step, because responses that were cut at the length limit may be
    # excluded from training (`Algorithm.mask_cut`).
    if found is None or not torch.equal(found[0], mask_T):
        found = batch.plans[key] = mask_T, make()
    return found[1]


def check_ids(tokens_T: torch.Tensor, vocabulary: int) -> None:
    """Raise ValueError unless all token ids, in host memory, are at least 0 and below the model's number of tokens."""
    low, high = (int(x) for x in torch.aminmax(tokens_T))
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"tokens must lie in [0, {vocabulary}), got values from {low} to {high}: "
            "the tokenizer has tokens that the model lacks"
        )


FORWARD = ("experts", "noise", "noise_scale")
"""Token columns that only a forward reads."""


def for_losses(micro: Batch, device: torch.device) -> Batch:
    """Return a micro-batch on the device, without the columns that only a forward reads."""
    columns = {name: x for name, x in micro.token.items() if name not in FORWARD}
    return Batch(micro.lengths, columns, micro.seq).to(device)
