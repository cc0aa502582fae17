"""Plans of many ranks against a brute-force reference, and their memory."""

import random
import tracemalloc

import numpy as np
import pytest

from benchmarks import push_plan
from spmdrl.weights.boxes import Entry, cut, meet, merged, most_dims, runs, size, to_boxes, to_rows
from spmdrl.weights.plan import Routes, Sets


def sets_of(boxes: list[list], dims: int) -> Sets:
    """Makes the sets that ranks would exchange: equal boxes once."""
    found: dict[bytes, tuple[int, np.ndarray]] = {}
    of = []
    for mine in boxes:
        rows = to_rows(mine, dims)
        rows = rows[runs(rows)[0]]
        of.append(found.setdefault(rows.tobytes(), (len(found), rows))[0])
    return Sets([rows for _, rows in found.values()], np.array(of))


def random_range(rng: random.Random, n: int) -> tuple[int, int]:
    a, b = sorted(rng.sample(range(n + 1), 2))
    return a, b


def random_case(rng: random.Random) -> tuple[list[Entry], list[list], list[list], int]:
    """Cuts tensors into a grid of cells, each held by some ranks; every rank wants boxes of its own."""
    ranks = rng.randint(1, 6)
    shapes = [tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 6))]
    entries = [Entry(f"t{i}", shape) for i, shape in enumerate(shapes)]
    held: list[list] = [[] for _ in range(ranks)]
    for i, entry in enumerate(entries):
        cells = [()]
        for n in entry.shape:
            edges = sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 2)))})
            cells = [(*cell, edge) for cell in cells for edge in zip(edges, edges[1:], strict=False)]
        for cell in cells:
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                held[rank].append((i, cell))
    wanted = []
    for _ in range(ranks):
        boxes = [
            (i, tuple(random_range(rng, n) for n in entry.shape))
            for i, entry in enumerate(entries)
            for _ in range(rng.randint(0, 2))
        ]
        wanted.append(rng.choice(wanted) if wanted and rng.random() < 0.4 else merged(boxes))
    return entries, held, wanted, rng.randint(1, len(entries))


def planned(entries: list[Entry], held: list[list], wanted: list[list], tensors: int) -> list[list]:
    """Returns every rank's buckets, of so many tensors each."""
    dims = most_dims(entries)
    places = np.arange(len(entries)) // tensors
    out = []
    for rank, mine in enumerate(held):
        rows = to_rows(mine, dims)
        order, begins = runs(rows)
        sets = sets_of(held, dims), sets_of(wanted, dims)
        routes = Routes(*sets, rank, order[begins], entries, places)
        out.append([routes.bucket(k) for k in range(1 + int(places[-1]))])
    return out


def check(entries: list[Entry], held: list[list], wanted: list[list], tensors: int) -> None:
    """Checks regions of all ranks against those of nested loops, and sent messages against expected ones."""
    plans = planned(entries, held, wanted, tensors)
    sent = {}
    for rank, buckets in enumerate(plans):
        for k, bucket in enumerate(buckets):
            for places, regions in bucket.send:
                for place in places:
                    assert (k, rank, place) not in sent, "one message in a bucket"
                    sent[k, rank, place] = [(held[rank][n][0], region) for n, region in regions]
                    assert all(cut(held[rank][n][1], region) == region for n, region in regions)
    received = {}
    for rank, buckets in enumerate(plans):
        got, mine = [], set(held[rank])
        everything = {box for boxes in held for box in boxes}
        want = [(i, cut(box, cell)) for i, box in wanted[rank] for j, cell in everything if i == j]
        for k, bucket in enumerate(buckets):
            received |= {(k, sender, rank): regions for sender, regions in bucket.receive.items()}
            own = [(held[rank][n][0], region) for n, region in bucket.own]
            assert all(cut(held[rank][n][1], region) == region for n, region in bucket.own)
            travels = [region for regions in bucket.receive.values() for region in regions]
            # No region comes from elsewhere that is held here.
            assert not [1 for i, region in travels for j, box in mine if i == j and cut(box, region) is not None]
            assert all(i // tensors == k for i, _ in own + travels)
            got += own + travels
        assert sorted(got) == sorted(x for x in want if x[1] is not None)
        assert sum(size(box) for _, box in got) == sum(size(box) for _, box in wanted[rank])
    assert sent == received


def test_routes_are_those_of_a_search_over_all_pairs():
    for seed in range(250):
        check(*random_case(random.Random(seed)))


def test_routes_name_what_nobody_holds():
    missing = 0
    for seed in range(60):
        entries, held, wanted, tensors = random_case(random.Random(seed))
        if not held[0]:
            continue
        lost = held[0][0]
        held = [[cell for cell in mine if cell != lost] for mine in held]
        if any(i == lost[0] and cut(box, lost[1]) is not None for boxes in wanted for i, box in boxes):
            missing += 1
            with pytest.raises(ValueError, match=f"t{lost[0]}: the ranks together do not hold all of"):
                planned(entries, held, wanted, tensors)
        else:
            check(entries, held, wanted, tensors)
    assert 10 < missing < 50


def test_overlapping_holders_do_not_hide_a_hole():
    """[0:4] and [0:2] have as many rows as [0:6], whose 4 and 5 nobody holds."""
    entries = [Entry("a", (6,))]
    want = [[(0, ((0, 6),))], []]
    for held in ([[(0, ((0, 4),))], [(0, ((0, 2),))]], [[], [(0, ((0, 4),)), (0, ((0, 2),))]]):
        with pytest.raises(ValueError, match=r"a: ranks hold different boxes that overlap in \(\(0, 6\),\)"):
            planned(entries, held, want, 1)


def counted(shape: tuple[int, ...], boxes: set) -> np.ndarray:
    """Counts for each element of a tensor the boxes that hold it."""
    out = np.zeros(shape, dtype=int)
    for box in boxes:
        out[tuple(slice(a, b) for a, b in box)] += 1
    return out


def test_plans_that_are_accepted_bring_every_element_once():
    """Cells are moved or lost: a rank has a plan exactly if one box holds each element that it wants."""
    found = {"": 0, "the ranks together do not hold": 0, "overlap": 0, "hidden": 0}
    for seed in range(300):
        rng = random.Random(seed)
        entries, held, wanted, tensors = random_case(rng)
        lost, moved = rng.choice(((0, 0.1), (0.2, 0), (0.3, 0.5)))
        for mine in held:
            for n, (i, _) in enumerate(mine):
                if rng.random() < moved:
                    mine[n] = (i, tuple(random_range(rng, size) for size in entries[i].shape))
        held = [[cell for cell in dict.fromkeys(mine) if rng.random() >= lost] for mine in held]
        dims, places = most_dims(entries), np.arange(len(entries)) // tensors
        sets = sets_of(held, dims), sets_of(wanted, dims)
        counts = [counted(e.shape, {b for h in held for j, b in h if j == i}) for i, e in enumerate(entries)]
        for rank, needs in enumerate(wanted):
            parts = [counts[i][tuple(slice(a, b) for a, b in box)] for i, box in needs]
            holes, twice = any((part == 0).any() for part in parts), any((part > 1).any() for part in parts)
            order, begins = runs(to_rows(held[rank], dims))
            try:
                Routes(*sets, rank, order[begins], entries, places)
                said = ""
            except ValueError as error:
                said = next(kind for kind in list(found)[1:] if kind in str(error))
            assert said == ("overlap" if twice else "the ranks together do not hold" if holes else ""), (seed, rank)
            found[said] += 1
            found["hidden"] += any((part == 0).any() and part.sum() >= part.size for part in parts)
    assert found.pop("hidden") > 10, "holes that overlaps make up for"
    assert min(found.values()) > 50, found


def test_a_small_plan_makes_its_buckets_once(monkeypatch):
    """Every push asks for all buckets; those of a large plan would take memory for as long as it lasts."""
    from spmdrl.weights import plan as routes

    entries, box = [Entry(name, (4,)) for name in "abc"], ((0, 4),)
    held, wanted = sets_of([[(i, box) for i in range(3)], []], 1), sets_of([[], [(i, box) for i in range(3)]], 1)
    for kept, small in ((2, False), (3, True)):
        monkeypatch.setattr(routes, "SMALL", kept)
        for rank in range(2):
            plan = Routes(held, wanted, rank, np.arange(3 - 3 * rank), entries, np.arange(3))
            first, second = ([plan.bucket(k) for k in range(3)] for _ in range(2))
            assert first == second and all(bucket.send or bucket.receive for bucket in first)
            assert [a is b for a, b in zip(first, second, strict=True)] == [small] * 3


def test_routes_of_replicas_take_turns():
    """The same box is on 32 ranks in two sets; 16 receivers are the first and second ranks of engines of eight."""
    entries, box = [Entry("a", (4,)), Entry("b", (4,))], ((0, 4),)
    held = [[(0, box), (1, box)][: 0 if r % 8 < 4 else 2 if r % 8 < 6 else 1] for r in range(64)]
    wanted = [[(0, box)] if r % 8 == 0 else [(0, box), (1, box)] if r % 8 == 1 else [] for r in range(64)]
    plans = planned(entries, held, wanted, 1)
    senders = [sender for r in range(64) if r % 8 < 2 for sender in plans[r][0].receive]
    assert len(senders) == len(set(senders)) == 16


def test_meeting_in_small_steps_is_the_same(monkeypatch):
    from spmdrl.weights import boxes

    monkeypatch.setattr(boxes, "MEETING", 3)
    for seed in range(40):
        check(*random_case(random.Random(seed)))


def test_rows_and_boxes_are_two_forms_of_one_thing():
    entries = [Entry("a", ()), Entry("b", (3,)), Entry("c", (4, 5, 6))]
    boxes = [(2, ((1, 2), (0, 5), (3, 4))), (0, ()), (1, ((0, 2),)), (1, ((0, 2),))]
    rows = to_rows(boxes, most_dims(entries))
    assert to_boxes(rows, entries) == boxes
    order, begins = runs(rows)
    assert to_boxes(rows[order[begins]], entries) == [boxes[1], boxes[2], boxes[0]]


def test_plan_of_512_ranks_does_not_hold_what_others_hold():
    """A mixture of 128 experts goes over 512 ranks to engines of tp 8: all ranks have 15 MiB of rows."""
    model, ranks = push_plan.checkpoint_of("qwen3-30b", layers=2), 512
    held, wanted = push_plan.fsdp(model, ranks), push_plan.vllm(model, ranks)
    everything = sum(sets.rows[s].nbytes for sets in (held, wanted) for s in sets.of)
    assert everything > 15 << 20
    tracemalloc.start()
    try:
        routes, buckets = push_plan.plan(model, push_plan.exchanged(held), push_plan.exchanged(wanted), 5)
        lasting, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20 and lasting < 1 << 20, (peak, lasting)
    row = push_plan.traffic(model, held, routes, buckets, 5)
    assert row["digests"] < row["region_digests"] / 2 and row["received"] <= row["region_received"]


@pytest.mark.parametrize("trainer", [push_plan.fsdp, push_plan.megatron])
@pytest.mark.parametrize("ep", [False, True])
def test_simulated_ranks_bring_every_element_once(trainer, ep, monkeypatch):
    """The layouts of the benchmark are whole: the messages to two ranks of 128 fill everything they want."""
    from spmdrl.weights import boxes

    def no_pairs(one, other):
        assert not len(one), "shards are seen to be apart without a look at every pair"
        return meet(one, other)

    monkeypatch.setattr(boxes, "meet", no_pairs)  # `clashing` calls it in the same way.
    model, ranks = push_plan.checkpoint_of("qwen3-30b", layers=8), 128
    held, wanted = trainer(model, ranks), push_plan.vllm(model, ranks, ep=ep)
    for rank in (5, 125):
        routes, buckets = push_plan.plan(model, held, wanted, rank)
        filled = {}
        mine = to_boxes(held.rows[held.of[rank]], model.entries)
        for k in range(buckets):
            bucket = routes.bucket(k)
            own = [(mine[n][0], box) for n, box in bucket.own]
            for i, box in [*own, *(x for regions in bucket.receive.values() for x in regions)]:
                filled[i] = filled.get(i, 0) + size(box)
        want = to_boxes(wanted.rows[wanted.of[rank]], model.entries)
        assert filled == {i: size(box) for i, box in want}


def test_simulated_fsdp_is_that_of_the_policy():
    """The rows of a rank are the pieces that `Layout` makes of its shards."""
    import torch
    from transformers import AutoModelForCausalLM

    from spmdrl.weights.experts import Layout, full_box
    from spmdrl.weights.shards import shard_rows

    model = push_plan.checkpoint_of("qwen3-30b", layers=1)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(model.config)
    layout, index = Layout(hf), {entry.name: i for i, entry in enumerate(model.entries)}
    for ranks in (8, 200):
        held = push_plan.fsdp(model, ranks)
        for rank in (0, 5, ranks - 1):
            slots = [
                slot
                for name, p in hf.named_parameters()
                for slot in layout.slots(
                    name, tuple(p.shape), (shard_rows(p.shape[0], ranks, rank), *full_box(p.shape[1:]))
                )
            ]
            want = sorted((index[slot.name], slot.box) for slot in slots)
            assert to_boxes(held.rows[held.of[rank]], model.entries) == want
