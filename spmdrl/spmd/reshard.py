"""Named tensors from the ranks that hold parts of them to the ranks that need parts of them, and no byte more.

Who holds and who needs what are boxes: a range in every dimension of the whole tensor. Each rank cuts what it holds
with what the others need and sends just that, a bucket of tensors at a time; while one bucket is used the next travels.
The module knows nothing of models: `policy/` says what it holds, `rollout/` what it needs.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from spmdrl.spmd.digest import digest
from spmdrl.spmd.exchange import all_gather_rows, all_gather_text
from spmdrl.spmd.flight import send_and_receive
from spmdrl.spmd.here import alive

Box = tuple[tuple[int, int], ...]
"""First and last + 1 index in every dimension."""
DIMS = 5
"""Most dimensions of a tensor that travels."""
ALIGN = 16
HEADER = 8
"""Bytes of a digest."""
IN_CACHE = 2 << 20
"""Bytes of a bucket that is cast, summed and loaded without leaving a CPU's cache."""

MAPPED, KEPT = 32 << 20, 64 << 20
"""Bytes. A larger block than the first glibc takes from the kernel anew each time unless told otherwise, and its page
faults were a third of a push: blocks for such tensors are kept from push to push, up to the second in all."""


class CorruptWeightsError(RuntimeError):
    """What arrived is not what was sent."""


@dataclass
class Piece:
    """The part of a named tensor that a rank holds; `tensor` has the box's shape."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    tensor: torch.Tensor
    exact: bool = False
    """It travels in its own type: routing biases, which rounded would choose other experts."""


@dataclass(frozen=True)
class Entry:
    """A whole tensor, by name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """Of one that keeps its own; None for what is cast."""

    @property
    def box(self) -> Box:
        """All of it."""
        return tuple((0, n) for n in self.shape)


def size(box: Box) -> int:
    """Elements inside."""
    return math.prod(b - a for a, b in box)


def cut(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(a < b for a, b in both) else None


def inside(tensor: torch.Tensor, box: Box, origin: Box | None = None) -> torch.Tensor:
    """The view of a box; origin: the box that the tensor itself is, None for a whole tensor."""
    if box == origin:
        return tensor
    for dim, (a, b) in enumerate(box):
        start = a - (origin[dim][0] if origin else 0)
        tensor = tensor.narrow(dim, start, b - a)
    return tensor


def catalogue(pieces: list[Piece], group: dist.ProcessGroup) -> list[Entry]:
    """All tensors of which any rank of a host-side group holds a part, alike on every rank. Collective."""
    mine = {p.name: [str(p.tensor.dtype).removeprefix("torch.") if p.exact else "", *p.shape] for p in pieces}
    text = json.dumps(mine)
    marks = torch.cat(all_gather_rows(torch.tensor([[hash_of(text)]]), group))[:, 0].tolist()
    # Ranks that hold parts of the same tensors say it once.
    first = marks.index(hash_of(text)) == dist.get_group_rank(group, dist.get_rank())
    found: dict[str, list] = {}
    for said in all_gather_text(text if first else "{}", group):
        found |= json.loads(said)
    return [
        Entry(name, tuple(shape), getattr(torch, dtype) if dtype else None) for name, (dtype, *shape) in found.items()
    ]


def hash_of(text: str) -> int:
    """A digest of a text as int64."""
    return int(digest(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)))


def _to_row(index: int, box: Box) -> list[int]:
    flat = [x for pair in box for x in pair]
    return [index, *flat, *([0, 1] * (DIMS - len(box)))]


def _gather_boxes(boxes: list[tuple[int, Box]], entries: list[Entry], group) -> list[list[tuple[int, Box]]]:
    """(tensor, box) of every rank. Collective."""
    rows = torch.tensor([_to_row(i, box) for i, box in boxes], dtype=torch.int64).reshape(-1, 1 + 2 * DIMS)
    return [
        [
            (row[0], tuple((row[1 + 2 * d], row[2 + 2 * d]) for d in range(len(entries[row[0]].shape))))
            for row in part.tolist()
        ]
        for part in all_gather_rows(rows, group)
    ]


@dataclass
class Bucket:
    """One bucket as this rank sees it; regions stand in the same order on both sides."""

    send: dict[int, list[tuple[int, Box]]] = field(default_factory=dict)
    """Rank -> (own piece, region)."""
    receive: dict[int, list[tuple[int, Box]]] = field(default_factory=dict)
    """Rank -> (tensor, region)."""
    own: list[tuple[int, Box]] = field(default_factory=list)
    """(own piece, region) that this rank holds and needs."""


@dataclass
class Flight:
    """A bucket on its way."""

    bucket: Bucket
    works: list
    inbox: dict[int, torch.Tensor]
    outbox: list[torch.Tensor]
    """Kept until they have left."""


class Reshard:
    """A plan, made once, by which tensors travel as often as wanted."""

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
        """Plan. Collective.

        Args:
            entries: as `catalogue` gives them.
            pieces: what this rank holds. Where several ranks hold the same box, one of them sends it.
            needs: (tensor, box) that this rank wants; boxes may overlap.
            host_group: all ranks that take part, on the host.
            device: where the tensors are.
            dtype: tensors are cast to it before they travel, but for those that keep their own.
            bucket_bytes: whole tensors of at most so many bytes travel at a time (a larger one alone).
            over: group on which tensors travel; None: the default one.

        Raises:
            ValueError: a part that is needed and that no rank holds.
        """
        self.entries, self.device, self.over = entries, device, over
        self.dtypes = [entry.dtype or dtype for entry in entries]
        self.me, ranks = dist.get_rank(), dist.get_process_group_ranks(host_group)
        if len(ranks) == 1 and device.type == "cpu":
            bucket_bytes = min(bucket_bytes, IN_CACHE)  # no message gains by being long
        self.index = index = {entry.name: i for i, entry in enumerate(entries)}
        self.bucket_of = _bucket_places(entries, dtype.itemsize, bucket_bytes)
        self.buckets = [Bucket() for _ in range(1 + max(self.bucket_of, default=-1))]
        held = _gather_boxes([(index[p.name], p.box) for p in pieces], entries, host_group)
        wanted = _gather_boxes(_merged(needs), entries, host_group)
        holders: dict[int, dict[Box, list[int]]] = {}
        for rank, boxes in zip(ranks, held, strict=True):
            for i, box in boxes:
                holders.setdefault(i, {}).setdefault(box, []).append(rank)
        own = {(index[p.name], p.box): n for n, p in enumerate(pieces)}
        mine_of: dict[int, list[tuple[Box, int]]] = {}
        for (i, box), n in own.items():
            mine_of.setdefault(i, []).append((box, n))
        for rank, boxes in zip(ranks, wanted, strict=True):
            for i, box in boxes:
                bucket = self.buckets[self.bucket_of[i]]
                if rank == self.me:
                    self._plan_own(bucket, i, box, holders.get(i, {}), own)
                    continue
                for source, n in mine_of.get(i, []):
                    region = cut(source, box)
                    if region and chosen(holders[i][source], rank) == self.me:
                        bucket.send.setdefault(rank, []).append((n, region))
        mine = wanted[ranks.index(self.me)]
        self.needed_bytes = sum(size(box) * self.dtypes[i].itemsize for i, box in mine)
        self.received_bytes = 0
        self.kept: dict[int, torch.Tensor] = {}

    def _plan_own(self, bucket: Bucket, i: int, box: Box, holders: dict[Box, list[int]], own) -> None:
        """How this rank gets one of its boxes."""
        covered = 0
        for source, ranks in holders.items():
            region = cut(source, box)
            if not region:
                continue
            covered += size(region)
            rank = chosen(ranks, self.me)
            if rank == self.me:
                bucket.own.append((own[i, source], region))
            else:
                bucket.receive.setdefault(rank, []).append((i, region))
        if covered < size(box):
            raise ValueError(f"{self.entries[i].name}: no rank holds all of {box}")

    def run(self, pieces: list[Piece]) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors that this rank needs, bucket by bucket: whole in shape, filled inside the boxes. Collective.

        Every rank gets as many buckets, some of them empty.

        pieces: the same as at the start, with the values of this moment. A tensor that this rank holds whole, in the
        right type, comes as it is: it is to be read only.

        Raises:
            CorruptWeightsError: what arrived is not what was sent; names the tensor and the rank.
        """
        flights: deque[Flight] = deque()
        self.received_bytes = 0
        for bucket in self.buckets:
            flights.append(self._start(bucket, pieces))
            if len(flights) > 1:
                yield self._finish(flights.popleft(), pieces)
        while flights:
            yield self._finish(flights.popleft(), pieces)

    @torch.no_grad()
    def _start(self, bucket: Bucket, pieces: list[Piece]) -> Flight:
        operations, outbox, inbox = [], [], {}
        cache: dict[tuple[int, Box], torch.Tensor] = {}
        # Once for all who want a part: some are computed when they are looked at.
        held = {n: pieces[n].tensor for regions in bucket.send.values() for n in dict(regions)}
        for rank, regions in bucket.send.items():
            kinds = [(self.dtypes[self.index[pieces[n].name]], box) for n, box in regions]
            out = torch.empty(message_bytes(kinds), dtype=torch.uint8, device=self.device)
            outbox.append(out)
            digests, parts = _layout(out, kinds)
            for (n, region), part, place in zip(regions, parts, range(len(regions)), strict=True):
                part.copy_(inside(held[n], region, pieces[n].box))
                if (n, region) not in cache:
                    cache[n, region] = digest(part)
                digests[place] = cache[n, region]
            operations.append(dist.P2POp(dist.isend, out, rank, self.over))
        for rank, regions in bucket.receive.items():
            nbytes = message_bytes((self.dtypes[i], box) for i, box in regions)
            inbox[rank] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.received_bytes += nbytes
            operations.append(dist.P2POp(dist.irecv, inbox[rank], rank, self.over))
        return Flight(bucket, send_and_receive(operations), inbox, outbox)

    @torch.no_grad()
    def _finish(self, flight: Flight, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        alive()
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
        for rank, regions in bucket.receive.items():
            digests, parts = _layout(flight.inbox[rank], [(self.dtypes[i], box) for i, box in regions])
            wrong = torch.nonzero(torch.stack([digest(part) for part in parts]) != digests).flatten().tolist()
            if wrong:
                i, region = regions[wrong[0]]
                raise CorruptWeightsError(
                    f"weights changed on their way to the engine: {self.entries[i].name} {list(region)} from rank "
                    f"{rank}; the engine keeps no version and will not sample"
                )
            for (i, region), part in zip(regions, parts, strict=True):
                entry = self.entries[i]
                inside(self._space(whole, i), region, entry.box).copy_(part)
        return whole

    def _space(self, whole: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        """Room for a tensor. Of memory that nothing is written to, a CPU takes none."""
        entry = self.entries[i]
        if entry.name in whole:
            return whole[entry.name]
        room = self.kept.get(i)
        if room is None:
            room = torch.empty(entry.shape, dtype=self.dtypes[i], device=self.device)
            if room.is_cpu and MAPPED < room.nbytes <= KEPT - sum(x.nbytes for x in self.kept.values()):
                self.kept[i] = room
        whole[entry.name] = room
        return room


def chosen(ranks: list[int], receiver: int) -> int:
    """Which of the ranks that hold the same box sends it: the receiver itself, or another by turns."""
    return receiver if receiver in ranks else ranks[receiver % len(ranks)]


def message_bytes(regions: Iterable[tuple[torch.dtype, Box]]) -> int:
    """Of one message: digests, then the regions."""
    regions = list(regions)
    return aligned(HEADER * len(regions)) + sum(aligned(size(box) * dtype.itemsize) for dtype, box in regions)


def aligned(n: int) -> int:
    """The next multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


def _layout(message: torch.Tensor, regions: list[tuple[torch.dtype, Box]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A message's digests (int64 [regions]) and its regions, as views."""
    at, parts = aligned(HEADER * len(regions)), []
    for dtype, box in regions:
        nbytes = size(box) * dtype.itemsize
        parts.append(message[at : at + nbytes].view(dtype).view([b - a for a, b in box]))
        at += aligned(nbytes)
    return message[: HEADER * len(regions)].view(torch.int64), parts


def _bucket_places(entries: list[Entry], itemsize: int, bucket_bytes: int) -> list[int]:
    """Bucket of each tensor: consecutive ones together."""
    places, bucket, held = [], 0, 0
    for entry in entries:
        nbytes = size(entry.box) * itemsize
        if held and held + nbytes > bucket_bytes:
            bucket, held = bucket + 1, 0
        places.append(bucket)
        held += nbytes
    return places


def _merged(needs: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Each tensor's boxes without overlap: those that touch or overlap become the box around them."""
    out: dict[int, list[Box]] = {}
    for i, box in needs:
        boxes = out.setdefault(i, [])
        while True:
            near = next((b for b in boxes if _joins(b, box)), None)
            if near is None:
                break
            boxes.remove(near)
            box = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(near, box, strict=True))
        boxes.append(box)
    return [(i, box) for i, boxes in out.items() for box in boxes]


def _joins(one: Box, other: Box) -> bool:
    """They overlap, or differ in one dimension in which they touch."""
    apart = [d for d, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
    overlap = cut(one, other) is not None
    touch = len(apart) <= 1 and all(one[d][0] <= other[d][1] and other[d][0] <= one[d][1] for d in apart)
    return overlap or touch
