"""Weights cut in one way and wanted in another: every byte arrives once, and a changed one is refused."""

import itertools
import math

import pytest
import torch

from spmdrl.engines.needs import watched_load
from spmdrl.spmd.checksum import digest, weighted_sum
from spmdrl.weights import reshard
from spmdrl.weights.boxes import cut, inside, size
from spmdrl.weights.reshard import CorruptWeightsError, Piece, Reshard, catalogue
from tests.ranks.harness import run_ranks

SHAPES = [(7, 6), (5,), (1, 3), (12, 4), (3,), (2, 3, 5), (10001,), (1,), (96, 48)]
"""Rows that 2, 3 and 4 ranks cannot share evenly, ranks left without a row."""


def whole() -> dict[str, torch.Tensor]:
    """Returns a tensor that is the same on every rank."""
    g = torch.Generator().manual_seed(4)
    return {f"t{i}": torch.randn(*shape, generator=g) for i, shape in enumerate(SHAPES)}


def shares(shape: tuple[int, ...], ranks: int, dim: int) -> list:
    """A box for each rank: equal ranges of one dimension, as torch.chunk cuts."""
    step = -(-shape[dim] // ranks)
    edges = [(min(i * step, shape[dim]), min((i + 1) * step, shape[dim])) for i in range(ranks)]
    return [tuple(edge if d == dim else (0, n) for d, n in enumerate(shape)) for edge in edges]


def held_by(rank: int, sources: int, copies: int) -> list[Piece]:
    """Returns row shards over the first `sources` ranks, `copies` times."""
    if rank >= sources * copies:
        return []
    pieces = []
    for name, x in whole().items():
        box = shares(tuple(x.shape), sources, 0)[rank % sources]
        if size(box):
            pieces.append(Piece(name, tuple(x.shape), box, inside(x, box).clone()))
    return pieces


def moved(world, sources, copies, targets, dim):
    """Moves row shards to shards of `dim` on the last `targets` ranks; bfloat16 and float32, many bucket sizes."""
    pieces = held_by(world.rank, sources, copies)
    place = world.rank - (world.size - targets)
    entries, out = catalogue(pieces, world.host_group), []
    needs = []
    for i, entry in enumerate(entries):
        box = shares(entry.shape, targets, min(dim, len(entry.shape) - 1))[place] if place >= 0 else ()
        if place >= 0 and size(box):
            needs.append((i, box))
    for dtype, nbytes in itertools.product((torch.float32, torch.bfloat16), (1, 500, 1 << 30)):
        plan = Reshard(entries, pieces, needs, world.host_group, world.device, dtype, nbytes)
        for _ in range(2):
            got = {name: x for bucket in plan.run(pieces) for name, x in bucket.items()}
            want = {name: x.to(dtype) for name, x in whole().items()}
            out.append(set(got) == {entries[i].name for i, _ in needs})
            out += [torch.equal(inside(got[entries[i].name], b), inside(want[entries[i].name], b)) for i, b in needs]
        here = sum(size(cut(p.box, b) or ((0, 0),)) for i, b in needs for p in pieces if p.name == entries[i].name)
        payload = sum(size(b) for _, b in needs) - here
        out.append(plan.needed_bytes == sum(size(b) for _, b in needs) * dtype.itemsize)
        out.append(payload * dtype.itemsize <= plan.received_bytes <= payload * dtype.itemsize + 64 * len(needs) * 4)
    return out


@pytest.mark.parametrize(
    ("n", "sources", "copies", "targets"), [(1, 1, 1, 1), (2, 2, 1, 2), (4, 2, 1, 2), (4, 2, 2, 4), (3, 3, 1, 2)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_reshard_brings_every_box_and_no_more(n, sources, copies, targets, dim):
    for result in run_ranks(moved, n, sources, copies, targets, dim):
        assert len(result) >= 12 and all(result)


def lacking(world):
    pieces = held_by(world.rank, 2, 1)[1:]
    entries = catalogue(held_by(world.rank, 2, 1), world.host_group)
    try:
        Reshard(entries, pieces, [(0, entries[0].box)], world.host_group, world.device, torch.float32, 1 << 20)
    except ValueError as error:
        return str(error)


def test_reshard_names_what_nobody_holds():
    assert run_ranks(lacking, 2) == ["t0: the ranks together do not hold all of ((0, 7), (0, 6))"] * 2


def flipped(world):
    """Flips every bit of every message once, by both digests, and one that nobody flips back."""
    pieces = held_by(world.rank, 2, 1)
    entries = catalogue(pieces, world.host_group)
    # The last of them is held by both ranks: a rank that refuses it leaves nobody waiting.
    needs = [(i, entry.box) for i, entry in enumerate(entries) if 1 < math.prod(entry.shape) < 500]
    plan, seen = Reshard(entries, pieces, needs, world.host_group, world.device, torch.bfloat16, 100), []
    check = plan._check

    def refused(flight):
        try:
            check(flight)
        except CorruptWeightsError as error:
            return str(error)

    def tampered(flight):
        for message in flight.inbox.values():
            for place, bit in itertools.product(range(len(message)), range(8)):
                message[place] ^= 1 << bit
                seen.append(bool(refused(flight)))
                message[place] ^= 1 << bit
        seen.append(not refused(flight))

    plan._check, out = tampered, []
    for take in (digest, weighted_sum):
        reshard.digest = take
        for _ in plan.run(pieces):
            pass
    buckets, last = itertools.count(), max(k for k in range(plan.buckets) if plan.routes.bucket(k).receive)

    def left(flight):
        if next(buckets) == last:
            for message in flight.inbox.values():
                message[-reshard.DIGEST - reshard.ALIGN] ^= 1
        check(flight)

    plan._check = left
    with pytest.raises(CorruptWeightsError) as error:
        out += plan.run(pieces)
    return seen, str(error.value), len(out), last


def test_stale_any_flipped_bit_is_refused_by_name():
    for rank, (seen, message, got, last) in enumerate(run_ranks(flipped, 2)):
        assert len(seen) > 2 * 8 * 100 and all(seen)
        assert "weights changed on their way to the engine" in message and got == last > 1
        assert (
            f"a message from rank {1 - rank} with t" in message
            and "differing messages of this bucket: 1 of 1" in message
        )


def refused_many(world):
    """Sends all tensors in one message; the third rank's message arrives unchanged."""
    pieces = held_by(world.rank, 3, 1)
    entries = catalogue(pieces, world.host_group)
    needs = [(i, entry.box) for i, entry in enumerate(entries)]
    plan = Reshard(entries, pieces, needs, world.host_group, world.device, torch.float32, 1 << 30)
    check = plan._check

    def tampered(flight):
        next(iter(flight.inbox.values()))[0] ^= 1
        check(flight)

    plan._check = tampered
    with pytest.raises(CorruptWeightsError) as error:
        list(plan.run(pieces))
    return str(error.value)


def test_stale_refused_message_names_some_of_its_tensors():
    for rank, message in enumerate(run_ranks(refused_many, 3)):
        sender = 1 if rank == 0 else 0
        shared = [i for i, shape in enumerate(SHAPES) if size(shares(shape, 3, 0)[sender])]
        names = ", ".join(f"t{i}" for i in shared[:3])
        listed = f"{names} and others ({len(shared)} tensors)"
        assert f"from rank {sender} with {listed}; differing messages of this bucket: 1 of 2" in message


def counted(world, copies):
    """Counts digests that this rank takes in a push from two ranks to all, and the plan's number of messages."""
    pieces = held_by(world.rank, 2, copies)
    entries = catalogue(pieces, world.host_group)
    needs = [(i, entry.box) for i, entry in enumerate(entries)]
    plan, calls = Reshard(entries, pieces, needs, world.host_group, world.device, torch.float32, 1000), []
    reshard.digest = lambda message: calls.append(len(message)) or digest(message)
    for _ in plan.run(pieces):
        pass
    buckets = [plan.routes.bucket(k) for k in range(plan.buckets)]
    received = sum(len(bucket.receive) for bucket in buckets)
    sent = [(len(places), len(regions)) for bucket in buckets for places, regions in bucket.send]
    return len(calls), received, sent


def test_a_message_has_one_digest_and_equal_messages_one_for_all():
    results = run_ranks(counted, 4, 1)
    for rank, (calls, received, sent) in enumerate(results):
        assert calls == received + len(sent)
        # The ranks without a part get the same message; the other rank, which has the same needs, too.
        assert all(places == 3 for places, _ in sent) and bool(sent) == (rank < 2)
    assert any(regions > 1 for _, regions in results[0][2])
    for calls, received, sent in run_ranks(counted, 4, 2):  # each part on two ranks: each sends to one other
        assert calls == received + len(sent) and all(places == 1 for places, _ in sent)


class Layer(torch.nn.Module):
    """An engine's layer on one of two ranks: q, k, v fused and cut by rows, o by columns, a bias of odd size."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.qkv = torch.nn.Parameter(torch.zeros(8, 6))
        self.o = torch.nn.Parameter(torch.zeros(8, 4))
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.norm = torch.nn.Parameter(torch.zeros(8))

    def load_weights(self, named):
        places = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
        for name, x in named:
            if name in places:
                at, rows = places[name]
                self.qkv.data[at : at + rows].copy_(x.narrow(0, self.rank * rows, rows))
            elif name == "o":
                self.o.data.copy_(x[:, 4 * self.rank : 4 * self.rank + 4])
            elif name == "turned":
                self.o.data.copy_(x.t()[:, :4] * 2)
            else:
                getattr(self, name).data.copy_(x)


@pytest.mark.parametrize("rank", [0, 1])
def test_needs_are_what_the_loader_reads(rank):
    layer = Layer(rank)
    shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (8, 8), "bias": (3,), "norm": (8,)}
    needs = watched_load(layer.load_weights, ((n, s, torch.float32) for n, s in shapes.items()))
    rows = [((r, r + n), (0, 6)) for r, n in ((rank * 4, 4), (rank * 2, 2), (rank * 2, 2))]
    columns = ((0, 8), (rank * 4, rank * 4 + 4))
    assert needs.boxes == [*zip(range(3), rows, strict=True), (3, columns), (4, ((0, 3),)), (5, ((0, 8),))]
    assert needs.exact and needs.counted == [True, True, True, True, False, True]
    assert needs.uncounted == {layer.bias.untyped_storage().data_ptr()}
    assert all((p == 0).all() for p in layer.parameters())  # nothing was loaded


def test_needs_of_a_loader_that_computes_are_what_it_reads():
    needs = watched_load(Layer(0).load_weights, [("turned", (4, 8), torch.float32)])
    assert needs.boxes == [(0, ((0, 4), (0, 8)))] and not needs.exact
