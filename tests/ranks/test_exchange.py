"""Ragged tables between ranks: every item once, bytes intact, where the plan sends it; law 2's layouts start here."""

import math

import pytest
import torch

from spmdrl.data.distribute import balance, gather_rows
from spmdrl.data.episode import FINISH_REASONS, Episode, episode_of
from spmdrl.data.pack import from_episodes
from spmdrl.spmd.balance import assign_balanced
from spmdrl.spmd.exchange import (
    Table,
    all_gather_distinct,
    all_gather_rows,
    all_gather_shared,
    all_gather_text,
    exchange,
    lexsort,
)
from spmdrl.spmd.payload import Payload
from spmdrl.spmd.seeds import generator_for
from tests.ranks.harness import run_ranks

RANKS = [1, 2, 3, 4]
COLUMNS = {
    "f32": (torch.float32, ()),
    "i64": (torch.int64, ()),
    "flag": (torch.bool, ()),
    "bf16": (torch.bfloat16, (3,)),
    "f64": (torch.float64, (2, 2)),
    "u8": (torch.uint8, ()),
}


def group_of(world):
    return torch.distributed.group.WORLD if world.size > 1 else None


def item(case: int, index: int) -> dict[str, torch.Tensor]:
    """Rows of one item, a function of its index: every rank can check them, wherever the item went."""
    rng = torch.Generator().manual_seed(1000 * case + index)
    out = {}
    for name, (dtype, shape) in COLUMNS.items():
        length = int(torch.randint(0, 7, (), generator=rng)) if name != "f32" else index % 5 + 1
        # Any bytes at all, nan patterns included.
        raw = torch.randint(0, 256, (length, *shape, dtype.itemsize), generator=rng).to(torch.uint8)
        out[name] = raw[..., 0] > 127 if dtype == torch.bool else raw.view(dtype)[..., 0]
    return out


def owners(case: int, n_items: int, ranks: int) -> list[int]:
    """Holder of each item before; case 1 leaves all with the last rank, case 2 nothing to rank 0."""
    rng = generator_for(7, case, ranks)
    if case == 1:
        return [ranks - 1] * n_items
    return [rng.randrange(1 if case == 2 and ranks > 1 else 0, ranks) for _ in range(n_items)]


def table_of(case: int, indices: list[int]) -> Table:
    items = [item(case, i) for i in indices]
    keys = torch.tensor([[i // 3, i % 3] for i in indices], dtype=torch.int64).view(-1, 2)
    empty = {name: torch.zeros((0, *shape), dtype=dtype) for name, (dtype, shape) in COLUMNS.items()}
    lengths = {name: torch.tensor([len(x[name]) for x in items], dtype=torch.int64) for name in COLUMNS}
    values = {name: torch.cat([empty[name], *[x[name] for x in items]]) for name in COLUMNS}
    return Table(keys, lengths, values)


def planned(case: int, n_items: int, ranks: int) -> list[int]:
    """Rank to which each item goes; case 3 sends all to rank 0."""
    rng = generator_for(8, case, ranks)
    return [0 if case == 3 else rng.randrange(ranks) for _ in range(n_items)]


def exchange_cases(world):
    out = []
    for case, n_items in enumerate([30, 17, 11, 24, 0, 1]):
        mine = [i for i, owner in enumerate(owners(case, n_items, world.size)) if owner == world.rank]
        generator_for(case, world.rank).shuffle(mine)  # arrival order is not sample order
        target = planned(case, n_items, world.size)

        def assign(rows, target=target):
            return torch.tensor([target[int(a) * 3 + int(b)] for a, b in rows[:, :2]], dtype=torch.int64)

        got, rows = exchange(table_of(case, mine), assign, group_of(world), world.device)
        out.append((got.keys_nK, got.lengths, got.values, rows))
    return out


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("n", RANKS)
def test_layout_exchange_moves_every_item_once_with_its_bytes(n):
    results = run_ranks(exchange_cases, n)
    for case, n_items in enumerate([30, 17, 11, 24, 0, 1]):
        target = planned(case, n_items, n)
        for rank in range(n):
            keys, lengths, values, rows = results[rank][case]
            want = [i for i in range(n_items) if target[i] == rank]
            assert [int(a) * 3 + int(b) for a, b in keys] == want  # sorted by key, as planned
            items = [item(case, i) for i in want]
            for name, (dtype, shape) in COLUMNS.items():
                assert lengths[name].tolist() == [len(x[name]) for x in items]
                assert values[name].dtype == dtype and values[name].shape[1:] == shape
                assert raw(values[name]) == b"".join(raw(x[name]) for x in items), (case, rank, name)
            # Rows of all items, sorted, alike on every rank: keys, then lengths in column order.
            everything = [item(case, i) for i in range(n_items)]
            assert rows.tolist() == [
                [i // 3, i % 3, *[len(x[name]) for name in COLUMNS]] for i, x in enumerate(everything)
            ]


def episodes() -> list[Episode]:
    """10 prompts x 4 samples with heavy-tailed lengths; prompt 3 is drawn twice (positions 3 and 7)."""
    rng = generator_for(5)
    out = []
    for position in range(10):
        for sample in range(4):
            length = min(400, 3 + int(rng.paretovariate(1.1) * 5))
            g = torch.Generator().manual_seed(position * 10 + sample)
            mask = torch.arange(length) >= 2
            if sample % 2 and length > 6:
                mask[4] = False  # what a tool said
            out.append(
                episode_of(
                    prompt=3 if position == 7 else position,
                    sample=sample,
                    position=position,
                    tokens=torch.randint(0, 47, (length,), generator=g),
                    mask=mask,
                    rollout_logp=-torch.rand(length, generator=g) * mask,
                    version=position,
                    finish=FINISH_REASONS[(position + sample) % 3],
                    reward=rng.random(),
                    parts={"a": rng.random()} if position % 2 else {},
                )
            )
    return out


def rank_batch(world, updates: int = 1, power: int = 1):
    everyone = episodes()
    owner = owners(2, len(everyone), world.size)
    batch = from_episodes([t for t, o in zip(everyone, owner, strict=True) if o == world.rank], ("a", "b"))
    batch.seq["update"] = batch.seq["position"] % updates
    batch.seq["work"] = batch.lengths**power
    return batch


def balance_cases(world):
    out = []
    for updates in (1, 2):
        for power in (1, 2):
            batch = balance(rank_batch(world, updates, power), world)
            out.append((batch.lengths, batch.token, batch.seq))
    return out


@pytest.mark.parametrize("n", RANKS)
def test_layout_balance_keeps_every_sequence_and_evens_the_work(n):
    results = run_ranks(balance_cases, n)
    everyone = {(t.position, t.sample): t for t in episodes()}
    for case, (updates, power) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)]):
        seen = []
        work = torch.zeros(updates, n)
        for rank in range(n):
            lengths, token, seq = results[rank][case]
            names = list(zip(seq["position"].tolist(), seq["sample"].tolist(), strict=True))
            assert names == sorted(names)  # sample order
            seen += names
            at = 0
            for i, name in enumerate(names):
                t, stop = everyone[name], at + int(lengths[i])
                assert torch.equal(token["tokens"][at:stop], t.tokens) and torch.equal(token["mask"][at:stop], t.mask)
                assert raw(token["rollout_logp"][at:stop]) == raw(t.rollout_logp)
                assert seq["reward"][i].item() == t.reward and seq["part/b"][i].isnan()
                part = torch.tensor([t.parts.get("a", math.nan)], dtype=torch.float64)
                assert raw(seq["part/a"][i : i + 1]) == raw(part)
                assert [seq[k][i].item() for k in ("prompt", "version", "turns", "update")] == [
                    t.prompt,
                    t.version,
                    t.turns,
                    t.position % updates,
                ]
                assert FINISH_REASONS[seq["finish"][i]] == t.finish
                work[seq["update"][i], rank] += float(lengths[i]) ** power
                at = stop
            assert at == len(token["tokens"])
        assert sorted(seen) == sorted(everyone)
        # 20 or 40 sequences with a heavy tail: no rank has more than one longest sequence above the mean.
        longest = max(len(t.tokens) for t in everyone.values()) ** power
        assert (work.max(1).values - work.mean(1) <= longest).all()


def images_of(position: int, sample: int) -> tuple[Payload, ...]:
    """Images of a sample: one of its prompt's, equal for the group, and sometimes one of its own; some prompts none."""
    names = [f"{position % 3:032x}"] * (position % 4 > 0) + [f"{0xFFFF << 112 | sample:032x}"] * (sample % 2)
    out = []
    for name in names:
        g = torch.Generator().manual_seed(int(name, 16) % 1000)
        tiled = int(name, 16) % 2
        shape = (tiled + 1, 3, 4, 4) if tiled else (int(name, 16) % 5 + 1, 6)
        layout = {"tiles": (0, tiled)} if tiled else {"grid": (1, shape[0], 1)}
        out.append(Payload(name, torch.randn(shape, generator=g), 2 + tiled, **layout))
    return tuple(out)


def image_cases(world):
    batch = rank_batch(world)
    batch.images = [
        images_of(*pair) for pair in zip(batch.seq["position"].tolist(), batch.seq["sample"].tolist(), strict=True)
    ]
    batch = balance(batch, world)
    held = {}
    for row in batch.images:
        for payload in row:
            # One object for each content, whichever rank it came from.
            assert held.setdefault(payload.name, payload) is payload and payload.pixels.is_contiguous()
            assert payload.pixels.untyped_storage().nbytes() == payload.pixels.nbytes
    return batch.seq["position"], batch.seq["sample"], batch.images


@pytest.mark.parametrize("n", RANKS)
def test_layout_images_travel_with_their_sequences_once_for_each_rank(n):
    seen = []
    for positions, samples, images in run_ranks(image_cases, n):
        for position, sample, row in zip(positions.tolist(), samples.tolist(), images, strict=True):
            seen.append((position, sample))
            for got, want in zip(row, images_of(position, sample), strict=True):
                assert torch.equal(got.pixels, want.pixels)
                assert all(getattr(got, x) == getattr(want, x) for x in ("name", "tokens", "grid", "tiles"))
    assert sorted(seen) == [(e.position, e.sample) for e in episodes()]


def gather_cases(world):
    batch = rank_batch(world)
    # Another order than that of samples; of a sequence with an odd sample two rows, of the others one.
    order = list(range(len(batch)))
    generator_for(6, world.rank).shuffle(order)
    batch = batch.select(torch.tensor(order, dtype=torch.int64))
    pairs = [(i, row) for i, sample in enumerate(batch.seq["sample"].tolist()) for row in range(1 + sample % 2)]
    seq_n, row_n = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    mine = torch.stack([batch.seq["reward"][seq_n], batch.seq["position"][seq_n].double(), row_n.double()], 1)
    columns, places = gather_rows(batch, seq_n, mine, world.data_peers)
    own = torch.equal(columns[places], mine)
    texts = [f"rank {world.rank}: grün, {'x' * 50 * world.rank}", "only odd ones speak" * (world.rank % 2), ""]
    ragged = torch.arange(world.rank * 2, dtype=torch.float64).view(-1, 2) + 100 * world.rank
    return (
        columns,
        own,
        [all_gather_text(t, world.host_group) for t in texts],
        all_gather_rows(ragged, group_of(world)),
    )


def test_layout_gathered_columns_are_alike_on_every_rank_and_world_size():
    want = [[t.reward, t.position, row] for t in episodes() for row in range(1 + t.sample % 2)]
    for n in RANKS:
        for columns, own, texts, rows in run_ranks(gather_cases, n):
            assert columns.tolist() == want and own  # bit for bit, in sample order
            assert texts[0] == [f"rank {r}: grün, {'x' * 50 * r}".strip() for r in range(n)]
            assert texts[1] == ["only odd ones speak" * (r % 2) for r in range(n)]
            assert texts[2] == [""] * n
            assert [len(part) for part in rows] == list(range(n))
            assert all((part >= 100 * r).all() and (part < 100 * r + 99).all() for r, part in enumerate(rows))


def uneven_cases(world):
    """Gathers rows of many ranks without padding, and equal ones once."""
    out = []
    for counts in ([0] * 4, [5, 5, 5, 5], [1000, 0, 0, 0], [0, 0, 0, 7], [1, 90, 0, 13], [0, 1, 0, 0]):
        mine = torch.arange(counts[world.rank] * 3, dtype=torch.float64).view(-1, 3) + 1e4 * world.rank
        padded = all_gather_rows(mine, group_of(world))
        shared = all_gather_shared(mine, counts[: world.size], group_of(world))
        out.append(len(shared) == len(padded) and all(map(torch.equal, shared, padded)))
    alike = torch.arange(6)[:, None] + world.rank % 2
    for rows in (alike, alike[: 0 if world.rank == 3 else 6], alike[:0], alike[:, 0], alike * 0):
        parts, of = all_gather_distinct(rows, group_of(world))
        everyone = all_gather_rows(rows, group_of(world))
        out.append(all(torch.equal(parts[n], mine) for n, mine in zip(of, everyone, strict=True)))
        out.append(len(parts) == len({tuple(mine.flatten().tolist()) for mine in everyone}) == 1 + max(of))
    return out


def test_layout_uneven_rows_arrive_as_with_padding_and_equal_ones_once():
    for n in RANKS:
        for out in run_ranks(uneven_cases, n):
            assert len(out) == 16 and all(out)


def test_lexsort_orders_by_first_column_first():
    keys = torch.tensor([[2, 0, 5], [1, 9, 0], [1, 2, 7], [2, 0, 4], [1, 2, 7]])
    order = lexsort(keys).tolist()
    assert [keys[i].tolist() for i in order] == sorted(keys.tolist())
    assert order.index(2) < order.index(4)  # stable
    assert assign_balanced(torch.tensor([5, 5]), torch.tensor([0, 1]), 3).unique().numel() == 1  # each share on its own


def direct_collectives(world):
    """Compares our collectives for FSDP and a push with gloo's, in whole numbers so that no order of a sum shows."""
    from spmdrl.spmd.gloo import DirectAllGather, DirectReduceScatter

    group, same = torch.distributed.group.WORLD, []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        for n in (1, 5, 4096):
            g = torch.Generator().manual_seed(world.rank * 100 + n)
            x = torch.randint(-8, 9, (n * world.size,), generator=g).to(dtype)
            want, got = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
            torch.distributed.reduce_scatter_tensor(want, x.clone(), group=group)
            DirectReduceScatter()(got, x.clone(), group, torch.distributed.ReduceOp.SUM)
            same.append(torch.equal(got, want))
            whole = torch.empty(n * world.size, dtype=dtype)
            torch.distributed.all_gather_into_tensor(whole, want, group=group)
            gather = DirectAllGather()
            ours = gather.allocate((n * world.size,), dtype=dtype, device=world.device)
            gather(ours, want, group)
            same.append(torch.equal(ours, whole))
            # FSDP hands in a piece of the output itself.
            ours = torch.zeros_like(whole)
            mine = ours[world.rank * n : (world.rank + 1) * n]
            mine.copy_(want)
            gather(ours, mine, group)
            same.append(torch.equal(ours, whole))
    return same


@pytest.mark.parametrize("n", [2, 3, 4])
def test_layout_direct_sends_give_what_gloos_own_collectives_give(n):
    for same in run_ranks(direct_collectives, n):
        assert len(same) == 36 and all(same)
