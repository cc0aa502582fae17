"""Plans a weight push, which sends updated weights from training ranks to engines, and simulates its largest buckets.

A bucket is a group of tensors that are sent together. A box is a slice of a weight tensor (`boxes.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from spmdrl.config.engines import Part
from spmdrl.plan.boxes import Everyone
from spmdrl.plan.paper import Paper
from spmdrl.plan.traffic import Traffic
from spmdrl.session import transfer
from spmdrl.weights import reshard
from spmdrl.weights.boxes import Piece, sizes
from spmdrl.weights.plan import Routes
from spmdrl.weights.reshard import Reshard

FEW = 16
"""Maximum number of buckets to simulate. If a push has more, only those around its memory peak are simulated."""


def plan_push(paper: Paper, moved: Any, everyone: Callable[[Part], Everyone]) -> None:
    """Plan the routes of a `Transfer` from the boxes of all ranks, and limit it to a few buckets.

    paper: counts the messages of all buckets. moved: the `Transfer`. everyone: maps a `Part` to the boxes of all ranks.
    """
    route = moved._route

    def planned(part: Part) -> Any:
        boxes = everyone(part)
        sets = iter((boxes.held(), boxes.wanted()))
        with (
            patch.object(transfer, "catalogue", lambda *_: boxes.entries),
            patch.object(reshard, "_gather_sets", lambda *_: next(sets)),
        ):
            made = route(part)
        made.plan.run = lambda pieces: heaviest(paper, made.plan, pieces)
        return made

    moved._route = planned


def heaviest(paper: Paper, plan: Reshard, pieces: list[Piece]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of the simulated buckets; count the bytes of all buckets.

    If there are more than `FEW` buckets, only two consecutive buckets that together need the most memory, and their
    neighbours, are simulated.
    """
    into, out, space = weights(plan)
    note(paper.traffic, plan)
    plan.received_bytes = int(into.sum())
    chosen = range(plan.buckets)
    if plan.buckets > FEW:
        # Each bucket starts before the previous one finishes, so two buckets use memory at the same time.
        load = into + out
        pairs = load[:-1] + load[1:] + space[:-1]
        at = int(pairs.argmax())
        chosen = range(max(0, at - 1), min(plan.buckets, at + 3))
    flights = []
    counting = paper.traffic.copy()
    for k in chosen:
        flights.append(plan._start(plan.routes.bucket(k), pieces))
        if len(flights) > 1:
            yield plan._finish(flights.pop(0), pieces)
    while flights:
        yield plan._finish(flights.pop(0), pieces)
    # `note` has already counted all buckets, so undo the counts from the simulated ones.
    for counts, before in ((paper.traffic.bytes, counting.bytes), (paper.traffic.calls, counting.calls)):
        for key in [key for key in counts if key[1] == "send"]:
            counts[key] = before[key]
            if not counts[key]:
                del counts[key]


def note(traffic: Traffic, plan: Reshard) -> None:
    """Count the bytes that this rank sends and receives over all buckets, in total and per peer."""
    everyone: Any = torch.distributed.group.WORLD
    traffic.axes["push"] = tuple(torch.distributed.get_process_group_ranks(everyone))
    routes: Routes = plan.routes
    width = np.array([d.itemsize for d in plan.dtypes])
    into = _bytes(routes.regions_in, width)
    ranks, which = np.unique(routes.sender, return_inverse=True)
    found = [("receive", int(rank), int(size)) for rank, size in zip(ranks, np.bincount(which, into), strict=True)]
    for parcel in routes.parcels:
        size = int(_bytes(parcel.regions[parcel.sent], width).sum())
        found += [("send", int(rank), size) for rank in parcel.ranks]
    for way in ("receive", "send"):
        traffic.put("push", way, sum(size for kind, _, size in found if kind == way))
    for way, rank, size in found:
        traffic.peers[way, rank] += size


def _bytes(regions: np.ndarray, width: np.ndarray) -> np.ndarray:
    return sizes(regions) * width[regions[:, 0]]


def weights(plan: Reshard) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes received, the bytes sent, and the size of the tensors to fill, each as one value per bucket."""
    routes: Routes = plan.routes
    width = np.array([d.itemsize for d in plan.dtypes])
    whole = np.array([int(np.prod(e.shape, dtype=np.int64)) for e in plan.entries]) * width
    into, out, space = (np.zeros(plan.buckets, dtype=np.int64) for _ in range(3))
    ends = np.array(routes.receive_ends, dtype=np.int64)
    rows = routes.regions_in
    of = np.repeat(np.arange(plan.buckets), np.diff(ends, prepend=0))
    np.add.at(into, of, _bytes(rows, width))
    tensors, first = np.unique(rows[:, 0], return_index=True)
    np.add.at(space, of[first], whole[tensors])
    for parcel in routes.parcels:
        sent = parcel.regions[parcel.sent]
        of = np.repeat(np.arange(plan.buckets), np.diff(parcel.ends, prepend=0))
        np.add.at(out, of, _bytes(sent, width) * len(parcel.ranks))
    return into, out, space
