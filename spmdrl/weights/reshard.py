"""Transfers the tensor slices that ranks need from the ranks that hold them, and no other bytes.

Slices are boxes (`boxes.py`). Each rank intersects the boxes that it holds with the boxes that other ranks need
(`plan.py`). The rank sends exactly these intersections, one bucket of tensors at a time, while the previous bucket is
in use. This module is model-agnostic: `policy/` provides the boxes that ranks hold, and `engines/` provides the boxes
that ranks need.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.health.flight_record import send_and_receive
from spmdrl.health.status import tick
from spmdrl.spmd.checksum import digest
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.exchange import all_gather_distinct
from spmdrl.weights.boxes import Box, Entry, Piece, inside, merged, most_dims, runs, size, sizes, to_rows
from spmdrl.weights.plan import Bucket, Regions, Routes, Sets

ALIGN = 16
DIGEST = 8
"""Size of a digest in bytes."""
IN_CACHE = 2 << 20
"""Maximum bucket size in bytes for the bucket to stay in a CPU's cache while it is cast, checked and loaded."""
NAMED = 3
"""Maximum number of tensors named in the error for a corrupt message."""


class CorruptWeightsError(RuntimeError):
    """Raised if received bytes differ from the sent bytes."""


def catalogue(pieces: list[Piece], group: dist.ProcessGroup) -> list[Entry]:
    """List all tensors of which at least one rank of the group holds a slice.

    Collective. All ranks return the same list.

    pieces: slices that this rank holds. group: a CPU process group.
    """
    mine = {p.name: [str(p.tensor.dtype).removeprefix("torch.") if p.exact else "", *p.shape] for p in pieces}
    raw = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    found: dict[str, list] = {}
    for content in all_gather_distinct(raw, group)[0]:
        found |= json.loads(content.numpy().tobytes())
    return [
        Entry(name, tuple(shape), getattr(torch, dtype) if dtype else None) for name, (dtype, *shape) in found.items()
    ]


def _gather_sets(rows: np.ndarray, group: dist.ProcessGroup) -> Sets:
    """Gather the boxes of every rank. rows: this rank's boxes as sorted, unique rows. Collective."""
    parts, of = all_gather_distinct(torch.from_numpy(rows), group)
    return Sets([part.numpy() for part in parts], np.array(of))


@dataclass
class Flight:
    """A bucket whose transfer is in flight."""

    bucket: Bucket
    works: list
    inbox: dict[int, torch.Tensor]
    outbox: list[torch.Tensor]
    """Outgoing messages, kept alive until the transfer is complete."""


class Reshard:
    """Transfers tensors repeatedly, with a plan that is computed once."""

    def __init__(
        self,
        entries: list[Entry],
        pieces: list[Piece],
        needs: list[tuple[int, Box]],
        host_group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        bucket_bytes: int,
        over: dist.ProcessGroup | None = None,
    ):
        """Compute the plan. Collective.

        entries: as returned by `catalogue`. pieces: this rank's slices. If several ranks hold the same box, one of them
        sends it. Distinct boxes must not overlap. needs: pairs (entry index, box) that this rank needs. These boxes may
        overlap. host_group: CPU process group of all participating ranks. device: device of the tensors. dtype: dtype
        that tensors are cast to before the transfer, unless their entry has a dtype. bucket_bytes: maximum bucket size
        in bytes, counting whole tensors. A larger tensor gets its own bucket. over: process group for the transfer, or
        None for the default group.

        Raises ValueError if no rank holds some part of a needed box, or if distinct held boxes overlap within it.
        """
        self.entries, self.device, self.over = entries, device, over
        self.dtypes = [entry.dtype or dtype for entry in entries]
        self.ranks = dist.get_process_group_ranks(host_group)
        if len(self.ranks) == 1 and kind_of(device) == "cpu":
            bucket_bytes = min(bucket_bytes, IN_CACHE)  # one rank sends no messages, so larger buckets gain nothing
        self.index = {entry.name: i for i, entry in enumerate(entries)}
        places = bucket_places(entries, dtype.itemsize, bucket_bytes)
        self.buckets = 1 + max(places, default=-1)
        dims = most_dims(entries)
        rows = to_rows([(self.index[p.name], p.box) for p in pieces], dims)
        order, begins = runs(rows)
        numbers = order[begins]
        wanted = to_rows(merged(needs), dims)
        wanted = wanted[runs(wanted)[0]]
        sets = _gather_sets(rows[numbers], host_group), _gather_sets(wanted, host_group)
        me = self.ranks.index(dist.get_rank())
        self.routes = Routes(*sets, me, numbers, entries, np.array(places))
        width = np.array([dtype.itemsize for dtype in self.dtypes])
        self.needed_bytes = int((sizes(wanted) * width[wanted[:, 0]]).sum())
        self.received_bytes = 0

    def run(self, pieces: list[Piece]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors that this rank needs, bucket by bucket. Collective.

        A yielded tensor has the shape of the whole tensor, but only the needed boxes are filled. Every rank yields the
        same number of buckets, some of which may be empty.

        pieces: the pieces that the plan was computed for, with current values. A tensor that this rank holds completely
        in the right dtype is yielded without a copy, so callers must not modify it. If received bytes differ from the
        sent bytes, raises CorruptWeightsError, which names the sending rank and the tensors.
        """
        flights: deque[Flight] = deque()
        self.received_bytes = 0
        for k in range(self.buckets):
            flights.append(self._start(self.routes.bucket(k), pieces))
            if len(flights) > 1:
                yield self._finish(flights.popleft(), pieces)
        while flights:
            yield self._finish(flights.popleft(), pieces)

    @torch.no_grad()
    def _start(self, bucket: Bucket, pieces: list[Piece]) -> Flight:
        operations, outbox, inbox = [], [], {}
        # Read each tensor only once for all receivers, because some pieces compute their tensor on every access.
        held = {n: pieces[n].tensor for _, regions in bucket.send for n in dict(regions)}
        for places, regions in bucket.send:
            kinds = [(self.dtypes[self.index[pieces[n].name]], box) for n, box in regions]
            out = torch.empty(message_bytes(kinds), dtype=torch.uint8, device=self.device)
            outbox.append(out)
            for (n, region), part in zip(regions, _regions_in(out, kinds), strict=True):
                part.copy_(inside(held[n], region, pieces[n].box))
            _digest_in(out).copy_(digest(out[:-DIGEST]))
            operations += [dist.P2POp(dist.isend, out, self.ranks[place], self.over) for place in places]
        for place, regions in bucket.receive.items():
            inbox[place] = torch.empty(message_bytes(self._kinds(regions)), dtype=torch.uint8, device=self.device)
            self.received_bytes += inbox[place].nbytes
            operations.append(dist.P2POp(dist.irecv, inbox[place], self.ranks[place], self.over))
        return Flight(bucket, send_and_receive(operations), inbox, outbox)

    def _kinds(self, regions: Regions) -> list[tuple[torch.dtype, Box]]:
        return [(self.dtypes[i], box) for i, box in regions]

    @torch.no_grad()
    def _finish(self, flight: Flight, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        tick()
        for work in flight.works:
            work.wait()
        bucket, whole = flight.bucket, {}
        for n, region in bucket.own:
            piece = pieces[n]
            i = self.index[piece.name]
            tensor = piece.tensor
            if region == self.entries[i].box and tensor.dtype == self.dtypes[i]:
                whole[piece.name] = tensor.contiguous()
            else:
                part = inside(self._space(whole, i), region, self.entries[i].box)
                part.copy_(inside(tensor, region, piece.box))
        self._check(flight)
        for place, regions in bucket.receive.items():
            parts = _regions_in(flight.inbox[place], self._kinds(regions))
            for (i, region), part in zip(regions, parts, strict=True):
                inside(self._space(whole, i), region, self.entries[i].box).copy_(part)
        return whole

    def _check(self, flight: Flight) -> None:
        """Compare the digests of all messages at once, because each comparison causes a device sync."""
        if not flight.inbox:
            return
        computed = torch.stack([digest(message[:-DIGEST]) for message in flight.inbox.values()])
        sent = torch.stack([_digest_in(message) for message in flight.inbox.values()])
        wrong = torch.nonzero(computed != sent).flatten().tolist()
        if wrong:
            place = list(flight.inbox)[wrong[0]]
            names = list(dict.fromkeys(self.entries[i].name for i, _ in flight.bucket.receive[place]))
            more = f" and others ({len(names)} tensors)" if len(names) > NAMED else ""
            raise CorruptWeightsError(
                f"weights changed on their way to the engine: a message from rank {self.ranks[place]} with "
                f"{', '.join(names[:NAMED])}{more}; differing messages of this bucket: {len(wrong)} of "
                f"{len(sent)}. The engine now has no valid weights and refuses to sample"
            )

    def _space(self, whole: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        """Return the tensor for entry i, allocating it on the first call.

        On a CPU, parts that are never written take no memory.
        """
        entry = self.entries[i]
        if entry.name not in whole:
            whole[entry.name] = torch.empty(entry.shape, dtype=self.dtypes[i], device=self.device)
        return whole[entry.name]


def message_bytes(kinds: Iterable[tuple[torch.dtype, Box]]) -> int:
    """Return the size in bytes of a message, which consists of the regions followed by their digest."""
    return DIGEST + sum(_aligned(size(box) * dtype.itemsize) for dtype, box in kinds)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _regions_in(message: torch.Tensor, kinds: Iterable[tuple[torch.dtype, Box]]) -> list[torch.Tensor]:
    """Return views of the regions in a message."""
    at, parts = 0, []
    for dtype, box in kinds:
        nbytes = size(box) * dtype.itemsize
        parts.append(message[at : at + nbytes].view(dtype).view([b - a for a, b in box]))
        at += _aligned(nbytes)
    return parts


def _digest_in(message: torch.Tensor) -> torch.Tensor:
    """Return a view of the sender's digest in a message: int64 scalar."""
    return message[-DIGEST:].view(torch.int64)[0]


def bucket_places(entries: list[Entry], itemsize: int, bucket_bytes: int) -> list[int]:
    """Return the bucket index of each tensor.

    A bucket has consecutive tensors with at most `bucket_bytes` bytes in total. A larger tensor gets its own bucket.
    """
    places, bucket, held = [], 0, 0
    for entry in entries:
        nbytes = size(entry.box) * itemsize
        if held and held + nbytes > bucket_bytes:
            bucket, held = bucket + 1, 0
        places.append(bucket)
        held += nbytes
    return places
