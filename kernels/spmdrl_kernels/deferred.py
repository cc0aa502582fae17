"""Checks values that are on a GPU without a wait for the device: the host reads the results of the checks later."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

Problem = Callable[[list], str]
"""A function of the checked numbers that returns the message of an error; empty if there is none."""


@dataclass(frozen=True)
class _Check:
    values: torch.Tensor
    """The numbers in pinned memory, valid once `copied` is done."""
    copied: torch.cuda.Event
    problem: Problem


_WAITING: deque[_Check] = deque()
"""Checks whose result the host has not read, in the order of the calls."""


def check_later(values: torch.Tensor, problem: Problem) -> None:
    """Raise ValueError if `problem` finds an error in a few numbers; for numbers on a GPU, a later call raises it.

    That call is the next one of this function for which the numbers have arrived on the host, or `raise_deferred`.
    """
    if not values.is_cuda:
        return _judge(values.tolist(), problem)
    _read(lambda check: check.copied.query())
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))
    _WAITING.append(_Check(copy, copied, problem))


def raise_deferred() -> None:
    """Wait for the checks of all earlier calls; raise ValueError for the first one that failed.

    Call this where the host waits for the device anyway, before results are used for anything that lasts.
    """

    def wait(check: _Check) -> bool:
        check.copied.synchronize()
        return True

    _read(wait)


def _read(arrived: Callable[[_Check], bool]) -> None:
    """Judge waiting checks in their order, up to the first that has not arrived; an error drops the others."""
    try:
        while _WAITING and arrived(_WAITING[0]):
            check = _WAITING.popleft()
            _judge(check.values.tolist(), check.problem)
    except BaseException:
        _WAITING.clear()
        raise


def _judge(values: list, problem: Problem) -> None:
    if message := problem(values):
        raise ValueError(message)
