"""Requests of each rank to the rendezvous store, and its work in a step, at 8 and at 1,024 ranks.

The store here is a fake: a dict that counts the requests and bytes of each rank. A real one does not count, and 1,024
processes do not fit on a machine of tests. The ranks are simulated one after the other, or by threads.
"""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spmdrl.health import heartbeat, overview
from spmdrl.health.heartbeat import Heartbeat
from spmdrl.spmd import exchange, mesh, queue
from spmdrl.spmd.agreement import rank_ranges
from spmdrl.spmd.devices import check_alike
from spmdrl.spmd.lockstep import Lockstep
from spmdrl.spmd.queue import PromptQueue, Tally

SIZES = (8, 1024)


class FakeStore(dist.Store):
    """A dict with the methods of torch's stores, which counts requests and bytes of the rank that `me` names."""

    def __init__(self):
        super().__init__()
        self.content: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.changed = threading.Condition()
        self.local = threading.local()

    def as_rank(self, rank: int) -> "FakeStore":
        """Counts what this thread asks for from here on as that rank's."""
        self.local.rank = rank
        return self

    def _count(self, keys, values=()) -> None:
        rank = getattr(self.local, "rank", 0)
        self.requests[rank] += 1
        self.bytes[rank] += sum(map(len, keys)) + sum(map(len, values))

    def _put(self, key: str, value) -> None:
        with self.changed:
            self.content[key] = value if isinstance(value, bytes) else value.encode()
            self.changed.notify_all()

    def set(self, key, value):
        self._count([key], [value])
        self._put(key, value)

    def get(self, key):
        self._count([key], [self.content[key]])
        return self.content[key]

    def add(self, key, amount):
        self._count([key], [b"12345678"])
        with self.changed:
            total = int(self.content.get(key, b"0")) + amount
            self.content[key] = str(total).encode()
            return total

    def append(self, key, value):
        self._count([key], [value])
        with self.changed:
            self._put(key, self.content.get(key, b"") + (value if isinstance(value, bytes) else value.encode()))

    def check(self, keys):
        self._count(keys)
        return all(key in self.content for key in keys)

    def multi_get(self, keys):
        found = [self.content[key] for key in keys]
        self._count(keys, found)
        return found

    def multi_set(self, keys, values):
        self._count(keys, values)
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def wait(self, keys, timeout=None):
        self._count(keys)
        with self.changed:
            assert self.changed.wait_for(lambda: all(key in self.content for key in keys), 60)

    def delete_key(self, key):
        self._count([key])
        return self.content.pop(key, None) is not None

    def set_timeout(self, timeout):
        """Accepts any limit: nothing here takes long."""

    def has_extended_api(self):
        return True

    def clone(self):
        return self


# ── the store ────────────────────────────────────────────────────────────────


def hearts(store: FakeStore, size: int, monkeypatch, away: int = -1) -> list[Heartbeat]:
    """Hearts of all ranks, which have beaten once; that of rank `away` from another line than the others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    made = [Heartbeat(store.as_rank(rank), rank, size, 30.0, lambda idle: None) for rank in range(size)]
    store.requests.clear()
    store.bytes.clear()
    for rank, heart in enumerate(made):
        store.as_rank(rank)
        heart._beat("rl/score.py:7" if rank == away else "rl/update.py:3", 0.0)
        assert not heart.store_silent
    return made


def test_a_beat_is_three_requests_however_many_ranks_there_are(monkeypatch):
    for size in SIZES:
        store = FakeStore()
        hearts(store, size, monkeypatch)
        assert set(store.requests.values()) == {3} and len(store.requests) == size
        assert max(store.bytes.values()) < 300


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_a_job_that_ends_read_few_beats_and_still_name_who_is_missing(size, monkeypatch):
    store, away = FakeStore(), size - 2
    made = hearts(store, size, monkeypatch, away)
    monkeypatch.setattr(heartbeat, "place", lambda: "rl/score.py:7" if store.local.rank == away else "rl/update.py:3")
    beat = store.bytes[0]
    store.requests.clear()
    store.bytes.clear()
    full = 0
    for rank, heart in enumerate(made):
        store.as_rank(rank)
        said = heart.missing()
        if rank != away:
            assert said.startswith(f"rank {away} has been in phase start of step 0 at rl/score.py:7 for "), said
            assert "more" not in said
        else:
            others = ", ".join(f"rank {r}" for r in range(overview.SHOWN))
            assert [part.split(" has been ")[0] for part in said.split(", ")] == others.split(", ")
            assert said.endswith(f"and {size - 1 - overview.SHOWN} more")
        full += len(heart.overview.beats()) == size
    assert full == min(size, overview.READERS)
    assert max(store.requests.values()) <= 4
    # Without a bound the ranks read size x size beats.
    assert sum(store.bytes.values()) < 4 * overview.READERS * size * beat + size * 6000
    assert max(store.bytes[rank] for rank in range(overview.READERS, size) or [0]) < 6000


def test_summary_groups_silent_ranks_and_many_places():
    beats = {
        r: {"count": 0, "place": f"a.py:{r}" if r < 60 else "b.py:1", "old": 9.0 * (r in (70, 71, 72))}
        for r in range(100)
    }
    groups = overview.grouped(beats, lambda beat: beat["old"])
    assert sum(group.count for group in groups) == 100 and len(groups) == overview.PLACES + 2, (
        "silent ranks and ranks at further places"
    )
    (silent,) = [group for group in groups if group.silent]
    assert silent.count == 3 and list(silent.first) == ["70", "71", "72"]
    assert len(json.dumps([vars(group) for group in groups])) < 15000


def test_an_overview_of_long_ago_is_not_believed(monkeypatch):
    """A rank that comes late and finds only an old summary does not repeat it."""
    monkeypatch.setattr(overview, "PAUSE", 0.0)
    store = FakeStore()
    store.content |= {"readers": b"8", "overview": json.dumps({"count": 1, "places": []}).encode()}
    late = overview.Overview(store, lambda: {0: {}}, lambda beat: 60.0)
    assert late.places() == [] and late.beats() == {} and late.missing(9, "a.py:1", {}) == ""


@pytest.mark.parametrize("size", SIZES)
def test_ranks_join_by_a_few_requests_each_and_rank_0_looks_once_for_all(size):
    store, second = FakeStore(), timedelta(seconds=60)
    prefixes = set()

    def join(rank: int) -> None:
        own = mesh.own_names(store.as_rank(rank), rank, size, second)
        own.set(f"came/{rank}", "")

    with ThreadPoolExecutor(64) as pool:
        for done in [pool.submit(join, rank) for rank in range(size)]:
            done.result()
    prefixes = {key.split("/")[0] for key in store.content if "/came/" in key}
    assert len(prefixes) == 1
    assert all(store.requests[rank] == 6 for rank in range(1, size))
    # Rank 0 looks every 20 ms, with four requests at most; 60 s of that are 12,000.
    assert store.requests[0] < 1000
    assert max(store.bytes[rank] for rank in range(1, size)) < 400


def test_one_key_says_on_which_device_all_ranks_work():
    for size in SIZES:
        store = FakeStore()
        for rank in range(size):
            check_alike(store.as_rank(rank), rank, torch.device("cpu"))
        assert set(store.requests.values()) == {1} and len(store.content) == 1


def engines(store: FakeStore, count: int):
    for index in range(count):
        yield SimpleNamespace(
            engine_index=index, engine_count=count, engine_tp_rank=0, engine_group=None, store=store.as_rank(index)
        )


def test_the_queue_asks_once_for_each_prompt_and_holds_one_key():
    for size in SIZES:
        store, taken = FakeStore(), []
        for world in engines(store, size):
            asks = PromptQueue(world, 4 * size, "step 1", "queue")
            # As long as there are prompts for the engines behind it.
            while len(asked := asks.take(1)) and len(taken) % 4 != 3:
                taken += asked
            taken += asked
        assert sorted(taken) == list(range(4 * size)) and len(store.content) == 1
        assert max(store.requests.values()) <= 4


def test_engines_without_news_leave_the_tally_alone(monkeypatch):
    """An engine asks at each of its steps whether it is enough: 1,000 of them within a second are 10 requests."""
    clock = [0.0]
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    store = FakeStore()
    a, b = (Tally(world, "step 1", 3, "queue") for world in engines(store, 2))
    for step in range(1000):
        clock[0] = step / 1000
        assert not a.reached(0)
    assert sum(store.requests.values()) <= 11
    assert not a.reached(1) and not a.reached(1) and b.reached(1), "news are told and heard at once"
    assert not a.reached(0)
    clock[0] += queue.POLL_EVERY
    assert a.reached(0)


class Unasked(FakeStore):
    """A fake store that does not count looks at whether a key is there: how many there are depends on time."""

    def check(self, keys):
        return all(key in self.content for key in keys)


def test_lockstep_debug_reads_no_entry_of_another_rank_while_all_agree(monkeypatch):
    asked = {}
    for size in (8, 64):
        store, group = Unasked(), SimpleNamespace(group_name="all")
        monkeypatch.setattr("spmdrl.spmd.lockstep.dist.get_process_group_ranks", lambda _, n=size: list(range(n)))
        monkeypatch.setattr("spmdrl.spmd.lockstep.dist.get_rank", lambda store=store: store.local.rank)
        monkeypatch.setattr("spmdrl.spmd.lockstep.call_site", lambda: "a.py:1")

        def run(rank, store=store, group=group):
            mode = Lockstep(store.as_rank(rank), 60.0)
            for _ in range(5):
                mode._compare(group, "allreduce_", [(3,)])

        with ThreadPoolExecutor(size) as pool:
            for done in [pool.submit(run, rank) for rank in range(size)]:
                done.result()
        # The last two turns stay, of which every rank has one entry, and all together three keys.
        assert len(store.content) == 2 * (size + 3)
        # Who comes last writes the verdict, and the group's first rank deletes what is shared.
        asked[size] = min(store.requests.values()), max(store.requests.values())
    assert asked[8][0] == asked[64][0] == 5 * 4 + 3 and asked[64][1] <= 5 * 6 + 3 * 4


# ── what a rank does in a step ───────────────────────────────────────────────


def gathers(monkeypatch, size: int) -> list[int]:
    """Makes this process one of `size` ranks that all send the same; bytes of each gather go into the returned list."""
    sent: list[int] = []

    def all_gather(out, mine, group):
        sent.append(mine.nbytes * size)
        out.copy_(mine.repeat(size, *[1] * (mine.dim() - 1)))

    fake = SimpleNamespace(
        get_world_size=lambda group: size,
        get_rank=lambda: 0,
        get_group_rank=lambda group, rank: 0,
        all_gather_into_tensor=all_gather,
        ProcessGroup=dist.ProcessGroup,
    )
    monkeypatch.setattr(exchange, "dist", fake)
    return sent


@pytest.mark.parametrize("size", SIZES)
def test_a_text_that_all_ranks_have_costs_16_bytes_of_each(size, monkeypatch):
    sent = gathers(monkeypatch, size)
    texts = exchange.all_gather_text("x" * 5000, object())
    assert texts == ["x" * 5000] * size and sent == [16 * size]
    assert exchange.gather_names(["b", "a"], object()) == ["a", "b"] and sent == [16 * size] * 2


@pytest.mark.parametrize("size", SIZES)
def test_an_exchange_works_on_its_items_not_on_all_ranks(size, monkeypatch):
    """Each of the ranks has eight items, of which the first goes to rank 0 and the others to rank 1."""
    gathers(monkeypatch, size)
    picked, select = [], exchange.select

    def counted(table, order):
        picked.append(len(order))
        return select(table, order)

    def all_to_all(inbox, out, sizes, given, group):
        assert len(sizes) == len(given) == size and sum(given) == len(out)
        inbox.copy_(out[: given[0]].repeat(size))

    monkeypatch.setattr(exchange, "select", counted)
    monkeypatch.setattr(exchange.dist, "all_to_all_single", all_to_all, raising=False)
    lengths = torch.arange(1, 9)
    values = torch.arange(int(lengths.sum()), dtype=torch.float32) + 7
    table = exchange.Table(torch.arange(8)[:, None], {"x": lengths}, {"x": values})
    rows = torch.cat([table.keys_nK, lengths[:, None]], 1)
    to = torch.tensor([0] + [1] * 7)
    got = exchange.redistribute(table, [rows] * size, [to] * size, object(), torch.device("cpu"))
    assert picked == [1, 7, size]
    assert got.values["x"].tolist() == [7.0] * size and got.lengths["x"].tolist() == [1] * size


def test_ranks_in_a_message_are_ranges_and_few():
    assert rank_ranges([0, 1]) == "0, 1" and rank_ranges(list(range(8))) == "0-7" and rank_ranges([3]) == "3"
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7, 8"
    assert rank_ranges(list(range(0, 1024, 2))) == "0, 2, 4, 6, 8, 10, 12, 14 and 504 more"
