"""Starts the process groups and named mesh axes of a run.

Every rank calls `start()` once and gets a `World`: device, groups and axes. Device collectives run on NCCL (GPU) or
gloo (CPU); small collectives on the host always run on a gloo group of their own.
"""

import os
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from spmdrl.config.schema import ParallelConfig
from spmdrl.spmd.devices import check_alike, pick_device
from spmdrl.spmd.groups import apart_from_default, make_data_group, make_mesh, make_shard_mesh, make_side
from spmdrl.spmd.rendezvous import own_names
from spmdrl.spmd.roles import axis_sizes, roles_of
from spmdrl.spmd.world import World

JOIN = timedelta(seconds=120)
"""Minimum time that ranks wait for each other at the start."""
LATER = timedelta(seconds=60)
"""Time after `--run.timeout` at which NCCL ends a job. `failure.watch` ends it before that, and names the rank."""


def _single_process_environment() -> None:
    """Set the environment of a world of one, for `python -m spmdrl.train` without torchrun."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")


def start(parallel: ParallelConfig, rollout_tp: int, device: str = "auto", timeout: float = 600.0) -> World:
    """Start the process groups and return this rank's world. Collective: every rank passes the same arguments.

    Args:
        parallel: sizes of the training axes.
        rollout_tp: ranks per engine.
        device: `auto`, `cpu` or `cuda`.
        timeout: seconds that a collective may wait.
    """
    _single_process_environment()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    where = pick_device(device, local_rank)
    wait = timedelta(seconds=timeout)
    later = wait + LATER if where.type == "cuda" else wait
    if not dist.is_initialized():
        if os.environ["WORLD_SIZE"] == "1":
            # Port 0 lets the system choose, so that two single-process runs never share a port.
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=wait)
        else:
            store, _, size = next(dist.rendezvous("env://", timeout=max(later, JOIN)))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = own_names(store, rank, size, max(later, JOIN))
            # Without an agent (`srun python -m spmdrl.train`) rank 0 makes the store for this start alone.
            check_alike(store, rank, where)
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            # Ranks start at different times: the first start on a machine may take a minute.
            timeout=max(later, JOIN),
            device_id=where if where.type == "cuda" else None,
        )
        dist.distributed_c10d._set_pg_timeout(later, dist.group.WORLD)
    return world_from_group(parallel, rollout_tp, where, local_rank, wait)


def world_from_group(
    parallel: ParallelConfig,
    rollout_tp: int,
    device: torch.device,
    local_rank: int = 0,
    wait: timedelta = timedelta(seconds=600),
) -> World:
    """Make the world on top of the existing default process group. Collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    roles = roles_of(parallel, size)
    sizes = axis_sizes(parallel, len(roles.trainers))
    kind = device.type
    mesh = make_mesh(kind, roles.trainers, sizes)
    shard_mesh = make_shard_mesh(kind, roles.trainers, sizes)
    later = wait + LATER if kind == "cuda" else wait
    data_group, holders = make_data_group(mesh, later)
    rollout = make_mesh(kind, roles.samplers, {"engine": len(roles.samplers) // rollout_tp, "tp": rollout_tp})
    host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    # Every rank makes every group.
    rollout_group = make_side(roles.samplers, host, wait)
    training_group = make_side(roles.trainers, host, wait)
    role_group = rollout_group if rank in roles.samplers else training_group
    if roles.scorers not in (roles.trainers, roles.samplers):
        scorers = make_side(roles.scorers, host, wait)
        role_group = scorers if rank in roles.scorers else role_group
    store = dist.PrefixStore("spmdrl", dist.distributed_c10d._get_default_store())
    meshes = [m for m in (mesh, shard_mesh, rollout) if m.get_coordinate() is not None]
    for group in {g for m in meshes for g in m.get_all_groups()}:
        # Meshes give their groups the library's default time-out, half an hour on gloo.
        dist.distributed_c10d._set_pg_timeout(later, group)
    return World(
        *(rank, size, local_rank, device, host, store, roles, rollout_group, training_group, role_group),
        *(mesh, rollout, shard_mesh, data_group, holders),
    )


def scoring_world(world: World, parallel: ParallelConfig, wait: timedelta) -> World:
    """Return the world of frozen models: `world` itself, unless they have ranks of their own. Collective.

    Megatron's axes divide frozen models as they divide the policy; over the remaining ranks they are sharded.
    """
    ranks = world.roles.scorers
    if ranks == world.roles.trainers:
        return world
    sizes = axis_sizes(replace(parallel, dp_replicate=1, dp_shard=-1, sp=1), len(ranks))
    mesh, shard_mesh = (make(world.mesh.device_type, ranks, sizes) for make in (make_mesh, make_shard_mesh))
    later = wait + LATER if world.device.type == "cuda" else wait
    data_group, holders = make_data_group(mesh, later)
    return replace(world, mesh=mesh, shard_mesh=shard_mesh, data_group=data_group, holders=holders)


def twin(world: World, wait: timedelta) -> World:
    """Return a world with the same ranks and axes on the host and its own groups, for a background thread. Collective.

    Its meshes are those of `world`: read positions from them, but do not communicate over them.
    """
    with apart_from_default():
        host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    training = make_side(world.roles.trainers, host, wait)
    groups = dict(host_group=host, training_group=training, role_group=training)
    return replace(world, **groups, device=torch.device("cpu"), is_twin=True)
