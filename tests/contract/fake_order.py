"""Finds races between streams of the fake GPU (`fake_cuda.py`): accesses to the same memory that no event orders.

Streams and events carry vector clocks. Two operations on different streams that use the same bytes, at least one of
them writing, are a race unless an event stands between them. It knows nothing of collectives and of the host's waits.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.contract.fake_cuda import FakeCuda
from tests.contract.fake_labels import place
from tests.contract.fake_streams import Event, RaceError, Stream, overlap

Clock = dict[Stream, int]


@dataclass
class Access:
    """One use of a tensor by an operation. The tensor stays alive, so that no other one gets its address."""

    name: str
    tensor: torch.Tensor
    writes: bool
    stream: Stream
    tick: int


class Order(TorchDispatchMode):
    """Checks every operation on the device between `with` and its end. Enter it after `FakeCuda`."""

    def __init__(self, gpu: FakeCuda):
        super().__init__()
        self.copies, self.clocks, self.accesses = gpu.copies, {}, []
        self.accesses: list[Access]
        self.recorded: dict[Event, Clock] = {}
        self.clocks: dict[Stream, Clock]

    @property
    def streams(self) -> set[Stream]:
        """Returns the streams on which operations ran."""
        return {access.stream for access in self.accesses}

    def clock(self, stream: Stream | None) -> Clock:
        """Returns how many operations of each stream come before the stream's next one."""
        return self.clocks.setdefault(stream or self.copies.current, {})

    def join(self, clock: Clock, other: Clock) -> None:
        """Orders what comes after `clock` after what comes before `other`."""
        for stream, tick in other.items():
            clock[stream] = max(tick, clock.get(stream, 0))

    def __enter__(self):
        """Gives the streams their clocks."""
        self.stack = ExitStack()

        def replaced(owner: type, name: str, effect: Any) -> None:
            own = getattr(owner, name)
            self.stack.enter_context(patch.object(owner, name, lambda *args: (own(*args), effect(*args))[0]))

        replaced(Stream, "wait_stream", lambda mine, other: self.join(self.clock(mine), self.clock(other)))
        replaced(Stream, "wait_event", lambda mine, event: self.join(self.clock(mine), self.recorded.get(event, {})))
        replaced(Event, "record", lambda event, stream=None: self.recorded.update({event: dict(self.clock(stream))}))
        return super().__enter__()

    def __exit__(self, *error):
        """Takes the clocks away."""
        super().__exit__(*error)
        self.stack.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation, and checks the memory that it used."""
        out, stream = func(*args, **(kwargs or {})), self.copies.current
        if func.is_view:
            return out
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        uses = [(x, name in written) for name, value in given.items() for x in tree_leaves(value)]
        for x, writes in [*uses, *((x, True) for x in tree_leaves(out))]:
            if isinstance(x, torch.Tensor) and place(x) == "cuda" and x.numel():
                self._check(Access(str(func), x, writes, stream, clock[stream]), clock)
        return out

    def _check(self, access: Access, clock: Clock) -> None:
        for earlier in self.accesses:
            unordered = earlier.stream is not access.stream and clock.get(earlier.stream, 0) < earlier.tick
            if unordered and (earlier.writes or access.writes) and overlap(earlier.tensor, access.tensor):
                raise RaceError(f"{access.name} and {earlier.name} use the same memory, and no event orders them")
        self.accesses.append(access)
