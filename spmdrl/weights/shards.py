"""One rank's shard of a parameter that FSDP2 shards over dim 0."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.weights.boxes import Box, Piece, full_box
from spmdrl.weights.experts import Layout


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """Return (first row, last row + 1) of one shard of dim 0, split as in torch.chunk and FSDP2's Shard(0).

    rows: size of dim 0. shards: number of shards. index: shard index.
    """
    size = -(-rows // shards)
    return min(index * size, rows), min((index + 1) * size, rows)


def shard_box(param: torch.Tensor) -> Box:
    """Return the box of a parameter on this rank: its shard if the parameter is sharded, else the whole parameter."""
    if not isinstance(param, DTensor):
        return full_box(param.shape)
    return _shard_box(param.device_mesh, tuple(param.shape))


@lru_cache(maxsize=4096)
def _shard_box(mesh: DeviceMesh, shape: tuple[int, ...]) -> Box:
    # Parameters are sharded over the last mesh dimension. Under HSDP they are replicated over the dimension before it.
    rows = shard_rows(shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
    return (rows, *full_box(shape[1:]))


def local(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, detached."""
    # Read the attribute directly, because `to_local()` would add an autograd node.
    return (param._local_tensor if isinstance(param, DTensor) else param).detach()


def pieces_of(named: Sequence[tuple[str, torch.Tensor]], layout: Layout, exact: bool = False) -> list[Piece]:
    """Return this rank's shards of a Shard(0) model as slices of checkpoint tensors, omitting empty shards.

    named: (name, parameter) pairs. exact: as in `Piece`.
    """
    return [
        Piece(slot.name, slot.shape, slot.box, local(param)[slot.index], exact)
        for name, param in named
        for slot in layout.slots(name, tuple(param.shape), shard_box(param))
    ]
