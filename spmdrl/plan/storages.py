"""Tracks live tensor storages on a device: bytes by purpose, and the peak."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Moment:
    """Snapshot of live bytes, by purpose."""

    live: int = 0
    by_tag: dict[str, int] = field(default_factory=dict)


class Storages:
    """Tracks each storage from the first `see` call for one of its tensors until the storage is freed."""

    def __init__(self, device: str):
        """device: device type whose storages are counted."""
        self.device = device
        self.live, self.by_tag = 0, Counter[str]()
        self.peak = Moment()
        self.tag = "activations"
        self.held: dict[int, tuple[int, str]] = {}

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Count allocations inside this context as `tag`."""
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before

    def lap(self) -> Moment:
        """Return the peak since the last call, and start a new measurement."""
        most, self.peak = self.peak, Moment(self.live, dict(self.by_tag))
        return most

    def retag(self, tensors: list[Any], tag: str) -> None:
        """Change the tag of these tensors' storages to `tag`."""
        for x in tensors:
            key = getattr(x, "_local_tensor", x).untyped_storage()._cdata
            if key in self.held:
                size, old = self.held[key]
                self.by_tag[old] -= size
                self.by_tag[tag] += size
                self.held[key] = size, tag

    def _grow(self, key: int, size: int, tag: str) -> None:
        self.live += size
        self.by_tag[tag] += size
        if self.live > self.peak.live:
            self.peak = Moment(self.live, dict(self.by_tag))

    def see(self, x: torch.Tensor) -> None:
        """Track a tensor's storage until it is freed."""
        if x.device.type != self.device:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        size = storage.nbytes()
        self.held[key] = size, self.tag
        weakref.finalize(storage, self._ended, key)
        self._grow(key, size, self.tag)

    def _ended(self, key: int) -> None:
        size, tag = self.held.pop(key, (0, ""))
        self.live -= size
        self.by_tag[tag] -= size

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized."""
        key = storage._cdata
        if key in self.held:
            size, tag = self.held[key]
            self.held[key] = storage.nbytes(), tag
            self._grow(key, storage.nbytes() - size, tag)
