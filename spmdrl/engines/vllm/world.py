"""Runs vLLM among ranks that have no engine, although vLLM uses the whole default process group.

vLLM creates its groups in `parallel_state`, from its own count of ranks 0 .. n - 1, each by all ranks of the default
group. Under split placement the training ranks take no part: vLLM then gets a world of the other ranks only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.spmd.groups import apart_from_default


class Overridden:
    """Replaces a module and overrides some of its names."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def world_of(ranks: tuple[int, ...]) -> Iterator[None]:
    """Give vLLM a world of `ranks` inside this context, in which it is built.

    Collective over `ranks`: the ranks with an engine, ascending. None of vLLM's groups, 2n - 1 for n ranks, is split
    off the run's NCCL communicator.
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

    patched = Overridden(
        dist,
        get_world_size=lambda group=None: dist.get_world_size(group) if group else len(ranks),
        get_rank=lambda group=None: dist.get_rank(group) if group else ranks.index(dist.get_rank()),
        new_group=new_group,
    )
    parallel_state.torch = Overridden(torch, distributed=patched)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        parallel_state.torch = torch  # type: ignore[attr-defined]
    # From here on senders and receivers need their true ranks.
    for reference in parallel_state._groups.values():
        group = reference()
        if group is not None:
            group.rank, group.ranks = dist.get_rank(), [ranks[i] for i in group.ranks]
            group.group_ranks = [[ranks[i] for i in members] for members in group.group_ranks]
