"""Runs Megatron-core on a part of the job's ranks: the training ranks under split placement, or the scoring ranks.

Megatron uses the default process group to count ranks, to gather objects and for barriers. In the modules of Megatron
that use it, this module replaces the global name `torch` by a substitute, whose default group is that of the ranks with
Megatron models. torch itself stays unchanged.
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
"""STRATEGIES and MODULES are the modules of megatron.core that use the default group when a policy runs."""
OVER_ALL = ("get_world_size", "barrier", "all_gather_object", "broadcast_object_list")
"""Functions of torch.distributed that these modules call without a group. `get_rank`, which they also call, is not
replaced: it must return the rank in the job."""
NAMES = 1_000_000
"""torch names groups by consecutive numbers. Ranks that create groups without the job's other ranks start at a multiple
of NAMES, which depends on the first of these ranks, so that the names of their groups are unique."""
_made: dict[int, int] = {}
_group: dist.ProcessGroup | None = None


def group() -> dist.ProcessGroup | None:
    """Return the host-side group of the ranks with Megatron models; None if all ranks of the job have them."""
    return _group


def _over(function: Any) -> Any:
    """Return a function of torch.distributed with another default group: that of `group()`."""
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
    """A substitute for torch in modules of megatron.core."""

    distributed = Distributed("torch.distributed")

    def __getattr__(self, name):
        return getattr(torch, name)


class _Checkpoint(types.ModuleType):
    """A substitute for torch.distributed.checkpoint, which reads checkpoints collectively over `group()`."""

    def __getattr__(self, name):
        return getattr(checkpoint, name)

    @staticmethod
    def load_state_dict(*args, **kwargs):
        return checkpoint.load_state_dict(*args, process_group=_group, **kwargs)


STAND_IN, CHECKPOINT = Torch("torch"), _Checkpoint("torch.distributed.checkpoint")


def over(ranks: dist.ProcessGroup | None) -> range:
    """Make Megatron run over the ranks of a host-side group, or for None over all ranks of the job; return the ranks.

    Their numbers in the job must be consecutive.
    """
    global _group
    numbers = dist.get_process_group_ranks(ranks) if ranks is not None else list(range(dist.get_world_size()))
    place = range(numbers[0], numbers[0] + len(numbers))
    assert list(place) == numbers, f"ranks {numbers} are not consecutive"
    _group = ranks if len(place) < dist.get_world_size() else None
    for name in (*MODULES, STRATEGIES):
        module: Any = importlib.import_module(f"megatron.core.{name}")
        # On a CPU the name is already replaced by the substitute of `cpu.py`, which includes this one.
        if module.torch is torch:
            module.torch = STAND_IN
    importlib.import_module(f"megatron.core.{STRATEGIES}").checkpoint = CHECKPOINT  # type: ignore[attr-defined]
    return place


@contextmanager
def making_groups(place: range) -> Iterator[None]:
    """Let Megatron create its groups over these ranks inside this context, without calls on any other rank.

    torch would split each group off the default communicator, and each split involves all ranks of the job. On hundreds
    of GPUs there are thousands of splits. Creating a gloo group involves ranks outside the group, too. So inside this
    context each group is created by its ranks alone, and its communicator when the ranks first use it.
    """
    from megatron.core import parallel_state

    module: Any = parallel_state
    ours, world = module.RankGenerator, dist.distributed_c10d._world
    count = world.group_count
    if _group is not None:
        # torch names a group by the number of groups created before it. Ranks that create groups alone would later give
        # a group of all ranks another name than the other ranks do. So groups of these ranks use a separate range of
        # numbers (NAMES).
        world.group_count = _made.get(place.start, NAMES * (1 + place.start))
        module.RankGenerator = lambda **sizes: ours(**sizes | {"rank_offset": place.start})
    try:
        with apart_from_default():
            yield
    finally:
        if _group is not None:
            _made[place.start], world.group_count = world.group_count, count
            module.RankGenerator = ours
