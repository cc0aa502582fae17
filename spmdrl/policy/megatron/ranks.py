"""Runs Megatron-core on some ranks of the job: under split placement the training ranks, or the scoring ranks.

Megatron uses the default group for the number of ranks, for gathers and for barriers. Its modules that do so get a
substitute for their global name `torch`, which uses the group of the ranks that hold the models; torch itself is
unchanged.
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
"""With MODULES, the modules of megatron.core that use the default group in a policy's operations."""
OVER_ALL = ("get_world_size", "barrier", "all_gather_object", "broadcast_object_list")
"""Functions of torch.distributed that these modules call without a group. A rank keeps its number in the job."""
NAMES = 1_000_000
"""Names of groups that ranks of one role create without the others start at multiples of this, one per first rank."""
_made: dict[int, int] = {}
_group: dist.ProcessGroup | None = None


def group() -> dist.ProcessGroup | None:
    """Return the host-side group of the ranks with this process's Megatron models; None if these are all ranks."""
    return _group


def _over(function: Any) -> Any:
    """Return a function of torch.distributed whose default group is `group()`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("group") is None:
            bound.arguments["group"] = _group
        return function(*bound.args, **bound.kwargs)

    return called


class Distributed(types.ModuleType):
    """torch.distributed with `group()` in place of the default group."""

    def __getattr__(self, name):
        value = getattr(torch.distributed, name)
        return _over(value) if _group is not None and name in OVER_ALL else value


class Torch(types.ModuleType):
    """Replaces torch in modules of megatron.core."""

    distributed = Distributed("torch.distributed")

    def __getattr__(self, name):
        return getattr(torch, name)


class _Checkpoint(types.ModuleType):
    """torch.distributed.checkpoint that reads over `group()`."""

    def __getattr__(self, name):
        return getattr(checkpoint, name)

    @staticmethod
    def load_state_dict(*args, **kwargs):
        return checkpoint.load_state_dict(*args, process_group=_group, **kwargs)


STAND_IN, CHECKPOINT = Torch("torch"), _Checkpoint("torch.distributed.checkpoint")


def over(ranks: dist.ProcessGroup | None) -> range:
    """Make Megatron work over the ranks of a host-side group, consecutive in the job, or over all for None.

    Returns those ranks.
    """
    global _group
    numbers = dist.get_process_group_ranks(ranks) if ranks is not None else list(range(dist.get_world_size()))
    place = range(numbers[0], numbers[0] + len(numbers))
    assert list(place) == numbers, f"ranks {numbers} are not consecutive"
    _group = ranks if len(place) < dist.get_world_size() else None
    for name in (*MODULES, STRATEGIES):
        module: Any = importlib.import_module(f"megatron.core.{name}")
        # On a CPU the substitute of `cpu.py` is already there.
        if module.torch is torch:
            module.torch = STAND_IN
    importlib.import_module(f"megatron.core.{STRATEGIES}").checkpoint = CHECKPOINT  # type: ignore[attr-defined]
    return place


@contextmanager
def making_groups(place: range) -> Iterator[None]:
    """Inside this context Megatron creates its groups over these ranks, without calls on any other rank.

    Splitting a group off the default communicator involves all ranks of the job, thousands of times on hundreds of
    GPUs; creating a host group involves even ranks outside it. So groups are created separately, and a communicator
    only when its ranks first use it.
    """
    from megatron.core import parallel_state

    module: Any = parallel_state
    ours, world = module.RankGenerator, dist.distributed_c10d._world
    count = world.group_count
    if _group is not None:
        # torch names a group by the number of groups before it. Ranks that create groups alone would later name a
        # group of all ranks differently from the rest of the job, so their own groups use another range of names.
        world.group_count = _made.get(place.start, NAMES * (1 + place.start))
        module.RankGenerator = lambda **sizes: ours(**sizes | {"rank_offset": place.start})
    try:
        with apart_from_default():
            yield
    finally:
        if _group is not None:
            _made[place.start], world.group_count = world.group_count, count
            module.RankGenerator = ours
