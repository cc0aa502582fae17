"""Plans which tensor slices ranks send to each other.

Every rank computes its plan from the slices that all ranks hold and need, which are boxes (`boxes.py`). The overlap of
a held box and a needed box is called a region. Tensors are transferred in buckets of consecutive tensors.

Data whose size grows with ranks times boxes stays in arrays. A plan stores the regions that its rank sends and receives
as rows, and creates Python objects for one bucket at a time. A small plan caches these objects for the next transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spmdrl.weights.boxes import Box, Entry, clashing, meet, runs, sizes, to_boxes

SMALL = 4096
"""A plan with at most this many sent and received regions caches its buckets, which then take a few MiB."""

Regions = list[tuple[int, Box]]
"""Pairs (piece or tensor index, region), in message order."""


@dataclass
class Sets:
    """The boxes of all ranks in a group, as sets. Ranks with the same boxes share a set."""

    rows: list[np.ndarray]
    """Rows of each set, sorted and unique (`boxes.to_rows`)."""
    of: np.ndarray
    """int64 [ranks]: index of each rank's set in `rows`."""


@dataclass
class Bucket:
    """The regions that one rank sends, receives and copies while one bucket is transferred."""

    own: Regions = field(default_factory=list)
    """Pairs (index of this rank's piece, region) for the regions that this rank both holds and needs."""
    send: list[tuple[list[int], Regions]] = field(default_factory=list)
    """Messages to send, each a tuple (destination ranks, list of (local piece index, region))."""
    receive: dict[int, Regions] = field(default_factory=dict)
    """Sending rank -> pairs (tensor index, region) in its message."""


@dataclass
class Parcel:
    """The regions that one rank sends to ranks with the same needs, across all buckets."""

    number: int
    """Index in `Sets.rows` of the boxes that the receiving ranks need."""
    ranks: list[int]
    """The receiving ranks."""
    piece: np.ndarray
    """int32 [n]: index of the sending rank's piece for each row of `regions`."""
    regions: np.ndarray
    """All regions of the needed boxes that the sending rank holds, as sorted rows."""
    sent: np.ndarray
    """int32: indices of the sent rows of `regions`."""
    ends: np.ndarray
    """int32 [buckets]: index in `sent` where each bucket ends."""


class Holders:
    """The distinct boxes that ranks hold, and the ranks that hold each box. Replicated boxes have several holders."""

    def __init__(self, held: Sets, wanted: np.ndarray):
        """Find the distinct boxes, and the ranks that hold each.

        held: boxes held by each rank. wanted: bool [tensors], False for tensors whose boxes are ignored.
        """
        near = [rows[wanted[rows[:, 0]]] for rows in held.rows]
        number = np.repeat(np.arange(len(near), dtype=np.int32), [len(rows) for rows in near])
        rows = np.concatenate(near)
        order, begins = runs(rows)
        self.rows = rows[order[begins]]
        self.sets, self.begins = number[order], begins
        self.counts = np.diff(np.append(begins, len(rows)))
        """Number of sets that contain each box. The sets of box i are `sets[begins[i] : begins[i] + counts[i]]`."""
        self.by_set = np.argsort(self.sets, kind="stable").astype(np.int32)
        self.places = np.repeat(np.arange(len(begins), dtype=np.int32), self.counts)[self.by_set]
        """Box indices of the first set, followed by those of the second set, and so on."""
        self.set_ends = np.cumsum(np.bincount(number, minlength=len(near)))
        self.of = held.of
        self.ranks = np.argsort(held.of, kind="stable")
        self.ranks_in = np.bincount(held.of, minlength=len(near))
        self.ranks_at = np.cumsum(self.ranks_in) - self.ranks_in

    def of_rank(self, rank: int) -> np.ndarray:
        """Return the sorted indices of the boxes that a rank holds."""
        s = self.of[rank]
        return self.places[self.set_ends[s - 1] if s else 0 : self.set_ends[s]]

    def senders(self, boxes: np.ndarray, receiver: int, turn: int) -> np.ndarray:
        """Return the sending rank of each box for one receiver. If the receiver itself holds a box, the receiver is the
        sender.

        boxes: box indices. receiver: a rank. turn: the receiver's position in an order of all ranks. Receivers at
        consecutive positions get a box from consecutive holders.
        """
        here = np.zeros(len(self.rows), dtype=bool)
        here[self.of_rank(receiver)] = True
        counts = self.counts[boxes]
        s = self.sets[self.begins[boxes] + turn % counts]
        others = self.ranks[self.ranks_at[s] + turn // counts % self.ranks_in[s]]
        return np.where(here[boxes], receiver, others)


class Routes:
    """One rank's plan: the regions that this rank sends, receives, or both holds and needs. Ranks are group ranks."""

    def __init__(
        self,
        held: Sets,
        wanted: Sets,
        me: int,
        pieces: np.ndarray,
        entries: Sequence[Entry],
        buckets: np.ndarray,
    ):
        """Compute the plan without communication.

        held: boxes held by each rank. If several ranks hold the same box, one of them sends it. Distinct boxes must not
        overlap. wanted: boxes needed by each rank, without overlap within a rank. me: this rank. pieces: int64, piece
        index of each box that this rank holds. buckets: int64 [tensors], bucket index of each tensor, ascending.

        Raises ValueError if no rank holds some part of a box that this rank needs, or if distinct held boxes overlap
        within such a box.
        """
        self.entries = entries
        count = 1 + int(buckets[-1]) if len(buckets) else 0
        mine, want = held.rows[held.of[me]], wanted.rows[wanted.of[me]]
        near = np.zeros(len(entries), dtype=bool)
        near[mine[:, 0]] = near[want[:, 0]] = True
        holders = Holders(held, near)
        # Ranks with the same needs and boxes get consecutive turns, which spreads their requests evenly over the
        # holders. Rank numbers would not spread them evenly, because the first rank of each engine is a multiple of the
        # engine size.
        self.turns = np.argsort(np.lexsort((held.of, wanted.of))).tolist()
        self._receive(holders, want, me, pieces, buckets, count)
        self._send(holders, wanted, me, pieces, buckets, count)
        self.small = len(self.regions_in) + sum(len(parcel.sent) for parcel in self.parcels) <= SMALL
        self.cache: dict[int, Bucket] = {}

    def _receive(self, holders: Holders, want: np.ndarray, me: int, pieces: np.ndarray, buckets, count: int) -> None:
        box, source, regions = meet(want, holders.rows)
        # If boxes overlapped, the sum below could hide a gap, and the choice between two copies of a region would be
        # arbitrary.
        if (twice := clashing(box, regions)).size:
            ((i, part),) = to_boxes(want[twice[:1]], self.entries)
            raise ValueError(
                f"{self.entries[i].name}: ranks hold different boxes that overlap in {part}; "
                "any two boxes of a tensor must be equal or disjoint"
            )
        # float64 counts exactly up to 2**53.
        covered = np.bincount(box, sizes(regions), len(want))
        if (lacking := np.flatnonzero(covered < sizes(want))).size:
            ((i, lacks),) = to_boxes(want[lacking[:1]], self.entries)
            raise ValueError(f"{self.entries[i].name}: the ranks together do not hold all of {lacks}")
        sender = holders.senders(source, me, self.turns[me])
        here = sender == me
        order, _ = runs(regions[here])
        kept = regions[here][order]
        piece = pieces[np.searchsorted(holders.of_rank(me), source[here][order])]
        self.own: list[Regions] = [[] for _ in range(count)]
        for bucket, n, (_, region) in zip(
            buckets[kept[:, 0]].tolist(), piece.tolist(), to_boxes(kept, self.entries), strict=True
        ):
            self.own[bucket].append((n, region))
        sender, regions = sender[~here], regions[~here]
        bucket = buckets[regions[:, 0]]
        order = np.lexsort((*regions.T[::-1], sender, bucket))
        self.regions_in, self.sender = regions[order], sender[order].astype(np.int32)
        self.receive_ends = np.searchsorted(bucket[order], np.arange(count), "right").tolist()

    def _send(self, holders: Holders, wanted: Sets, me: int, pieces: np.ndarray, buckets, count: int) -> None:
        self.parcels: list[Parcel] = []
        own = holders.of_rank(me)
        mine = holders.rows[own]
        for s, rows in enumerate(wanted.rows):
            place, _, regions = meet(mine, rows)
            order, _ = runs(regions)
            regions, source, piece = regions[order], own[place[order]], pieces[place[order]].astype(np.int32)
            alike: dict[bytes, list[int]] = {}
            for receiver in np.flatnonzero(wanted.of == s).tolist():
                sent = np.flatnonzero(holders.senders(source, receiver, self.turns[receiver]) == me).astype(np.int32)
                if receiver != me and len(sent):
                    alike.setdefault(sent.tobytes(), []).append(receiver)
            for raw, ranks in alike.items():
                sent = np.frombuffer(raw, dtype=np.int32)
                ends = np.searchsorted(buckets[regions[sent, 0]], np.arange(count), "right").astype(np.int32)
                self.parcels.append(Parcel(s, ranks, piece, regions, sent, ends))

    def bucket(self, k: int) -> Bucket:
        """Return one bucket as Python objects. The caller must not modify it."""
        if k in self.cache:
            return self.cache[k]
        bucket = self._bucket(k)
        if self.small:
            self.cache[k] = bucket
        return bucket

    def _bucket(self, k: int) -> Bucket:
        out = Bucket(self.own[k])
        begin, end = self.receive_ends[k - 1] if k else 0, self.receive_ends[k]
        if begin < end:
            boxes = to_boxes(self.regions_in[begin:end], self.entries)
            for sender, region in zip(self.sender[begin:end].tolist(), boxes, strict=True):
                out.receive.setdefault(sender, []).append(region)
        alike: dict[tuple[int, bytes], tuple[Parcel, np.ndarray, list[int]]] = {}
        for parcel in self.parcels:
            sent = parcel.sent[parcel.ends[k - 1] if k else 0 : parcel.ends[k]]
            if len(sent):
                alike.setdefault((parcel.number, sent.tobytes()), (parcel, sent, []))[2].extend(parcel.ranks)
        for parcel, sent, ranks in alike.values():
            boxes = to_boxes(parcel.regions[sent], self.entries)
            regions = [(n, box) for n, (_, box) in zip(parcel.piece[sent].tolist(), boxes, strict=True)]
            out.send.append((ranks, regions))
        return out
