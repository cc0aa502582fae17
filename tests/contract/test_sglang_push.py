"""Weights on their way to SGLang's process: the same bytes and hashes from a GPU as from a CPU, by one copy each."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from spmdrl.engines.sglang import transport
from spmdrl.engines.sglang.transport import Broadcast, SharedMemory, fetched
from tests.contract.fake_cuda import FakeCuda
from tests.contract.fake_labels import place
from tests.contract.fake_streams import Copies

TENSORS = {
    "rows": torch.randn(6, 4),
    "columns": torch.randn(5, 8).bfloat16(),
    "unread": torch.randn(3),
    "bytes": torch.arange(7, dtype=torch.uint8),
}
PARTS = {
    "rows": [((0, 2), (0, 4)), ((3, 6), (1, 3))],
    "columns": [((0, 5), (2, 6))],
    "unread": [],
    "bytes": [((0, 7),)],
}


@pytest.fixture
def copies(monkeypatch):
    """Copies from the fake GPU to the host, each True if it went to pinned memory without a wait."""
    made, give = [], Copies.give

    def counted(self, into, source, non_blocking):
        later = give(self, into, source, non_blocking)
        if place(into) == "cpu" and place(source) != "cpu":
            made.append(later)
        return later

    monkeypatch.setattr(Copies, "give", counted)
    return made


def put(tensors: dict[str, torch.Tensor]) -> tuple[list[dict], bytes]:
    memory = SharedMemory()
    entries = memory.put(tensors, PARTS)["entries"]
    return entries, mmap.mmap(memory.fd, 0).read()


def test_push_from_a_gpu_copies_each_box_once_and_tells_the_same(copies):
    plain = put(TENSORS)
    with FakeCuda():
        found = put({name: x.cuda() for name, x in TENSORS.items()})
    assert found == plain and copies == [True] * 4
    assert [len(entry["parts"]) for entry in plain[0]] == [2, 1, 0, 1]


def test_broadcast_from_a_gpu_copies_each_tensor_once_for_its_hash(copies, monkeypatch):
    def hashes(tensors: dict[str, torch.Tensor]) -> list[int]:
        sent: list[dict] = []
        process = SimpleNamespace(send=lambda do, entries: sent.extend(entries), answer=lambda: None)
        way = Broadcast(1, "gloo", 1.0)
        way.group = SimpleNamespace(broadcast=lambda *_: SimpleNamespace(wait=lambda: None))  # type: ignore[assignment]
        way.push(process, tensors)  # type: ignore[arg-type]
        return [entry["hash"] for entry in sent]

    plain = hashes(TENSORS)
    with FakeCuda():
        assert hashes({name: x.cuda() for name, x in TENSORS.items()}) == plain
    assert copies == [True] * 4


def test_push_from_a_cpu_copies_nothing_on_the_way():
    assert all(a is b for a, b in zip(fetched([*TENSORS.values()]), TENSORS.values(), strict=True))
    assert fetched([]) == [] and transport.entries({}) == []
