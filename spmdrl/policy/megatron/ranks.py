"""Runs Megatron-core on a subset of ranks: the training ranks with split placement, or the scoring ranks.

Megatron uses the default process group to count ranks, to gather objects and for barriers. In the Megatron modules that
use it, this module replaces the global name `torch` with a substitute whose default group contains only the ranks with
Megatron models. torch itself is not modified.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from spmdrl.spmd.mesh import apart_from_default

MODULES = ("parallel_state", "optimizer", "dist_checkpointing.serialization", "dist_checkpointing.validation")
STRATEGIES = "dist_checkpointing.strategies.torch"
"""STRATEGIES and MODULES are the megatron.core modules that use the default group while a policy runs."""
OVER_ALL = ("get_world_size", "barrier", "all_gather_object", "broadcast_object_list")
"""torch.distributed functions that these modules call without a group. The modules also call `get_rank`, which is not
replaced, because it must return the global rank."""
NAMES = 1_000_000
"""torch names process groups with consecutive numbers. Ranks that create groups on their own start at a multiple of
NAMES that depends on the first of these ranks, so that group names are unique."""
_made: dict[int, int] = {}
_group: dist.ProcessGroup | None = None


def group() -> dist.ProcessGroup | None:
    """Return the host-side process group of the ranks with Megatron models, or None if all ranks have them."""
    return _group


def _over(function: Any) -> Any:
    """Wrap a torch.distributed function so that its default group is `group()`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("group") is None:
            bound.arguments["group"] = _group
        return function(*bound.args, **bound.kwargs)

    return called


class Distributed(types.ModuleType):
    """A substitute for torch.distributed whose default group is `group()`."""

    def __getattr__(self, name):
        value = getattr(torch.distributed, name)
        return _over(value) if _group is not None and name in OVER_ALL else value


class Torch(types.ModuleType):
    """A substitute for torch in megatron.core modules."""

    distributed = Distributed("torch.distributed")

    def __getattr__(self, name):
        return getattr(torch, name)


class _Checkpoint(types.ModuleType):
    """A substitute for torch.distributed.checkpoint that loads checkpoints collectively over `group()`."""

    def __getattr__(self, name):
        return getattr(checkpoint, name)

    @staticmethod
    def load_state_dict(*args, **kwargs):
        return checkpoint.load_state_dict(*args, process_group=_group, **kwargs)


STAND_IN, CHECKPOINT = Torch("torch"), _Checkpoint("torch.distributed.checkpoint")


def over(ranks: dist.ProcessGroup | None) -> range:
    """Make Megatron run over the ranks of a host-side group (None for all ranks of the job); return the ranks.

    The global ranks must be consecutive.
    """
    global _group
    numbers = dist.get_process_group_ranks(ranks) if ranks is not None else list(range(dist.get_world_size()))
    place = range(numbers[0], numbers[0] + len(numbers))
    assert list(place) == numbers, f"ranks {numbers} are not consecutive"
    _group = ranks if len(place) < dist.get_world_size() else None
    for name in (*MODULES, STRATEGIES):
        module: Any = importlib.import_module(f"megatron.core.{name}")
        # On CPU, the name is already replaced by the substitute in `cpu.py`, which includes this one.
        if module.torch is torch:
            module.torch = STAND_IN
    importlib.import_module(f"megatron.core.{STRATEGIES}").checkpoint = CHECKPOINT  # type: ignore[attr-defined]
    return place


@contextmanager
def making_groups(place: range) -> Iterator[None]:
    """Inside this context, let Megatron create its process groups over these ranks without involving other ranks.

    torch would split each group off the default communicator. Each split involves all ranks of the job, and on hundreds
    of GPUs there are thousands of splits. Creating a gloo group also involves ranks outside of the group. Inside this
    context, each group is created only by its own ranks, and its communicator is created on first use.
    """
    from megatron.core import parallel_state

    module: Any = parallel_state
    ours, world = module.RankGenerator, dist.distributed_c10d._world
    count = world.group_count
    if _group is not None:
        # torch names a group by the number of groups created before it. If some ranks create groups on their own, they
        # would later disagree with other ranks on the name of a group of all ranks. So their groups use a separate
        # range of numbers (NAMES).
        world.group_count = _made.get(place.start, NAMES * (1 + place.start))
        module.RankGenerator = lambda **sizes: ours(**sizes | {"rank_offset": place.start})
    try:
        with apart_from_default():
            yield
    finally:
        if _group is not None:
            _made[place.start], world.group_count = world.group_count, count
            module.RankGenerator = ours
