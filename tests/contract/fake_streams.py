"""Streams of the fake GPU (`fake_cuda.py`): copies that the host does not wait for, and the waits that complete them.

A copy is done for the host once something has waited for it that stands behind it: the device, the stream that it was
given to, a stream that waits for that one, an event recorded there afterwards. Work other than copies is done at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.contract.fake_labels import place, storage_of
from tests.contract.fake_waits import Waits

GARBAGE = 0xA5
"""Bytes that stand in pinned memory before a copy to it is done."""


class RaceError(RuntimeError):
    """Error for memory that was used or freed during a copy that nobody waited for."""


@dataclass(eq=False)
class Copy:
    """One copy between pinned memory and the device."""

    into: torch.Tensor
    source: torch.Tensor
    value: torch.Tensor
    """Content of the source at the moment when the copy was asked for."""
    size: int
    """Bytes of the source's whole storage."""
    streams: set["Stream"]
    """Streams on which later work comes after the copy."""

    @property
    def host(self) -> torch.Tensor:
        """Returns the tensor of the two that is in pinned memory."""
        return self.into if place(self.into) == "cpu" else self.source

    def finish(self) -> None:
        """Performs the copy. Raises RaceError."""
        if storage_of(self.source).nbytes() != self.size:
            raise RaceError("memory was given back while it was being copied")
        if place(self.into) == "cpu":
            self.into.copy_(self.value)
        elif not torch.equal(self.source.view(torch.uint8), self.value.view(torch.uint8)):
            raise RaceError("pinned memory changed while it was being copied")


class Copies:
    """Copies that nobody has waited for, and the stream to which the next one goes."""

    def __init__(self, waits: Waits):
        self.waiting: list[Copy] = []
        self.waits = waits
        self.given = 0
        """Number of operations that the device was given."""
        self.current = self.default = Stream(copies=self)

    def give(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> bool:
        """Leaves a copy between pinned memory and the device for later; returns False for one that is done at once."""
        host = into if place(into) == "cpu" else source
        if not non_blocking or place(into) == place(source) or not getattr(storage_of(host), "_pinned", False):
            self.check(into, "aten.copy_")
            if place(into) != place(source):
                self.check(source, "aten.copy_")
            return False
        # Copies of one stream are in order.
        self.finish(c for c in self.waiting if self.current in c.streams and overlap(c.host, host))
        if host is source:
            self.check(source, "a copy on another stream")
        value = source.clone()
        self.waiting.append(Copy(into, source, value, storage_of(source).nbytes(), {self.current}))
        if host is into:
            into.view(torch.uint8).fill_(GARBAGE)
        else:
            into.copy_(source)
        return True

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raises RaceError if `tensor` is pinned memory to which a copy is under way."""
        for copy in self.waiting:
            if copy.host is copy.into and overlap(copy.into, tensor):
                raise RaceError(f"{name} uses pinned memory before the copy to it is done")

    def finish(self, some: Iterable[Copy]) -> None:
        """Performs some of the waiting copies, in their order."""
        some = list(some)
        self.waiting = [c for c in self.waiting if c not in some]
        with _disable_current_modes():
            for copy in some:
                copy.finish()

    def synchronize(self, *_: Any) -> None:
        """Performs all waiting copies (`torch.cuda.synchronize`)."""
        self.waits.add("synchronize")
        self.finish(self.waiting)

    @contextmanager
    def stream(self, stream: "Stream | None") -> Iterator[None]:
        """Replaces `with torch.cuda.stream(stream)`."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


class Stream:
    """`torch.cuda.Stream`. FakeCuda makes a subclass that knows its copies."""

    copies: Copies

    def __init__(self, *args: Any, copies: Copies | None = None, **kwargs: Any):
        if copies:
            self.copies = copies

    def _before(self) -> list[Copy]:
        return [c for c in self.copies.waiting if self in c.streams]

    def synchronize(self) -> None:
        """Performs all copies that this stream was given."""
        self.copies.waits.add("synchronize")
        self.copies.finish(self._before())

    def query(self) -> bool:
        """Returns True: the work is done when somebody asks."""
        self.copies.finish(self._before())
        return True

    def wait_stream(self, other: "Stream") -> None:
        """Orders later work of this stream after all work of the other."""
        for copy in other._before():
            copy.streams.add(self)

    def wait_event(self, event: "Event") -> None:
        """Orders later work of this stream after the event."""
        for copy in event.before:
            copy.streams.add(self)

    def record_event(self, event: Any = None) -> Any:
        """Records an event after all work given to this stream."""
        event = event or torch.cuda.Event()
        event.record(self)
        return event


class Event:
    """`torch.cuda.Event`. FakeCuda makes a subclass that knows its copies."""

    copies: Copies

    def __init__(self, *args: Any, **kwargs: Any):
        self.before: list[Copy] = []
        self.given = 0

    def record(self, stream: Stream | None = None) -> None:
        """Records the copies that the stream was given so far."""
        self.before = (stream or self.copies.current)._before()
        self.given = self.copies.given

    def wait(self, stream: Stream | None = None) -> None:
        """Orders later work of the stream after this event."""
        (stream or self.copies.current).wait_event(self)

    def synchronize(self) -> None:
        """Performs the copies that this event stands for."""
        if self.given == self.copies.given:
            self.copies.waits.add("synchronize")
        self._finish()

    def _finish(self) -> None:
        self.copies.finish(c for c in self.copies.waiting if c in self.before)

    def query(self) -> bool:
        """Returns True: the work is done when somebody asks."""
        self._finish()
        return True


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if two tensors have bytes in common; gaps between their elements count as theirs."""
    (start, end), (start_, end_) = _span(a), _span(b)
    return start < end_ and start_ < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
