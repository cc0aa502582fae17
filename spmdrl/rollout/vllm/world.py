"""vLLM among ranks that have no engine: it takes the default process group, whole, for its own.

Its groups are made in `parallel_state`, by numbers 0 .. n - 1 that it counts itself, each by all ranks of the default
group. Under split placement those who train have no part in it: there it is shown a world of the others alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.spmd.groups import apart_from_default


class _Shown:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def world_of(ranks: tuple[int, ...]) -> Iterator[None]:
    """Build vLLM inside. Collective over `ranks`, ascending, the ranks that have an engine.

    None of its groups, 2n - 1 for n ranks, is split off the run's NCCL communicator.
    """
    if len(ranks) == dist.get_world_size():
        with apart_from_default():
            yield
        return
    from vllm.distributed import parallel_state

    def new_group(members=None, **options):
        chosen = list(ranks) if members is None else [ranks[i] for i in members]
        with apart_from_default():
            return dist.new_group(chosen, use_local_synchronization=True, **options)

    shown = _Shown(
        dist,
        get_world_size=lambda group=None: dist.get_world_size(group) if group else len(ranks),
        get_rank=lambda group=None: dist.get_rank(group) if group else ranks.index(dist.get_rank()),
        new_group=new_group,
    )
    parallel_state.torch = _Shown(torch, distributed=shown)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        parallel_state.torch = torch  # type: ignore[attr-defined]
    # Senders and receivers are named by their true ranks from here on.
    for reference in parallel_state._groups.values():
        group = reference()
        if group is not None:
            group.rank, group.ranks = dist.get_rank(), [ranks[i] for i in group.ranks]
            group.group_ranks = [[ranks[i] for i in members] for members in group.group_ranks]
