"""The packing of the forward that runs.

Attention gets its packing as a keyword argument. Many families hand their other layers a few named arguments only, so
these layers ask here. Activation checkpointing runs a layer again during the backward, long after the forward, perhaps
on another thread: `again` carries the packing there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from spmdrl.policy.attention.packing import Packing

_PACKING: ContextVar[Packing | None] = ContextVar("packing", default=None)


def active() -> Packing | None:
    """Return the packing of the forward that runs; None where a model runs by itself."""
    return _PACKING.get()


@contextmanager
def over(packing: Packing | None) -> Iterator[None]:
    """Run a model's layers over a packing inside this context."""
    token = _PACKING.set(packing)
    try:
        yield
    finally:
        _PACKING.reset(token)


def again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a checkpointed forward and of its repetition (`context_fn` of torch's checkpoint)."""
    return nullcontext(), over(active())
