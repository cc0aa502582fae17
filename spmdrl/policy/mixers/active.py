"""The packing of the current forward.

Attention receives its packing as a keyword argument. Many families pass only a few named arguments to their other
layers, so these layers look it up here. Activation checkpointing runs a layer again in the backward, long after the
forward and perhaps on another thread: `again` carries the packing there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from spmdrl.policy.attention.packing import Packing

_PACKING: ContextVar[Packing | None] = ContextVar("packing", default=None)


def active() -> Packing | None:
    """Return the packing of the current forward; None where a model runs by itself."""
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
