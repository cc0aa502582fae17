"""Makes process groups and device meshes over some ranks of the job."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.spmd.roles import AXES


@contextmanager
def apart_from_default() -> Iterator[None]:
    """Inside this context new groups are not split off the default group's NCCL communicator.

    torch splits it if a device is bound to the default group. Ranks outside of a group then take part in making it, and
    a rank waits forever if the group itself is on gloo, or if the other ranks do not make the call.
    """
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def make_side(ranks: tuple[int, ...], host: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Make a host-side group of some ranks and one of the others; returns this rank's. Collective over all ranks."""
    size = dist.get_world_size()
    if len(ranks) == size:
        return host
    sides = [ranks, tuple(r for r in range(size) if r not in ranks)]
    with apart_from_default():
        # Every rank makes every group.
        both = [dist.new_group(side, backend="gloo", timeout=wait) for side in sides]
    mine = both[dist.get_rank() not in ranks]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def make_mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """Make named axes over some ranks of the job. Collective over all ranks."""
    if len(ranks) == dist.get_world_size():
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return DeviceMesh(kind, torch.tensor(ranks).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def make_shard_mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """Make `World.shard_mesh`, in which the ranks of one sp group are adjacent inside dp_shard. Collective."""
    axes = {axis: sizes[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes["dp_shard"] *= sizes["sp"]
    mesh = make_mesh(kind, ranks, axes)
    if mesh.get_coordinate() is None:
        return mesh
    return mesh["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else mesh["dp_shard"]


def make_data_group(mesh: DeviceMesh, wait: timedelta) -> tuple[dist.ProcessGroup | None, torch.Tensor]:
    """Make `World.data_group` and `World.holders`. Collective."""
    places = [AXES.index(axis) for axis in ("dp_replicate", "dp_shard", "pp", "sp", "tp")]
    ordered = mesh.mesh.long().permute(places)
    holders = ordered.reshape(ordered.shape[0] * ordered.shape[1], -1)
    positions, copies = holders.shape
    if positions == 1:
        return None, holders
    if positions == dist.get_world_size():
        return dist.group.WORLD, holders
    mine = None
    for ranks in holders.T.tolist():
        # Every rank makes every group.
        group = dist.new_group(ranks, timeout=wait)
        mine = group if dist.get_rank() in ranks else mine
    return mine, holders  # type: ignore[return-value]
