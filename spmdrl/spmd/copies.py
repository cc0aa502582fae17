"""Copies tensors between host memory and a rank's device without stalling the device.

A copy from pageable host memory blocks the host until the GPU has finished all earlier work, so the GPU then idles
while the host launches the next kernels. A copy from pinned memory is only enqueued.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


def to_device(value: Value, device: torch.device) -> Value:
    """Copy the host tensors in a value to a device asynchronously. For a CPU device, the same tensors are returned.

    value: a tensor, or a nested dataclass, dict, list or tuple that contains tensors. Any other value is passed
    through.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that occurs twice in the value is copied only once.
        if id(tensor) not in copies:
            pins = device.type == "cuda" and tensor.device.type == "cpu"
            # The pinned-memory allocator does not reuse the buffer before the copy is complete.
            copies[id(tensor)] = tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)
        return copies[id(tensor)]

    return _mapped(value, copied)


def on_host(results: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a host copy of each tuple, after requesting the next tuple to keep the device busy."""
    waiting: tuple[tuple[torch.Tensor, ...], Any] | None = None
    for tensors in results:
        # Without waiting for the event, these copies could be read before they are complete.
        copies = tuple(x.to("cpu", non_blocking=True) for x in tensors)
        event = torch.cuda.Event() if any(x.device.type == "cuda" for x in tensors) else None
        if event is not None:
            event.record()
        if waiting:
            yield _arrived(*waiting)
        waiting = copies, event
    if waiting:
        yield _arrived(*waiting)


def _arrived(copies: tuple[torch.Tensor, ...], event: Any) -> tuple[torch.Tensor, ...]:
    if event is not None:
        event.synchronize()
    return copies


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a value with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, change) for part in value)
    return value
