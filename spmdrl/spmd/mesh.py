"""Creates a run's process groups and its device meshes with named axes.

Every rank calls `start()` once and gets a `World` with its device, process groups and mesh axes. Device collectives run
on NCCL (GPU) or gloo (CPU). Small host collectives always use a separate gloo group.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.config.schema import ParallelConfig
from spmdrl.spmd.devices import check_alike, pick_device
from spmdrl.spmd.roles import AXES, axis_sizes, roles_of
from spmdrl.spmd.world import World

JOIN = timedelta(seconds=120)
"""Time limit for all ranks to join at startup. A longer `--run.timeout` takes precedence."""
LATER = timedelta(seconds=60)
"""Extra time after `--run.timeout` before NCCL aborts a job. `failure.watch` aborts it earlier and names the rank."""
JOIN_POLL = 0.02
"""Seconds between rank 0's polls of the store while ranks join."""


def start(parallel: ParallelConfig, rollout_tp: int, device: str = "auto", timeout: float = 600.0) -> World:
    """Start the process groups and return this rank's world. Collective: all ranks must pass the same arguments.

    rollout_tp: ranks per engine. device: `auto`, `cpu` or `cuda`. timeout: seconds before a collective times out.
    """
    # Without torchrun, `python -m spmdrl.train` is a single-rank job.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    where = pick_device(device, local_rank)
    wait = timedelta(seconds=timeout)
    later = wait + LATER if where.type == "cuda" else wait
    if not dist.is_initialized():
        if os.environ["WORLD_SIZE"] == "1":
            # Port 0 lets the OS choose, so that two single-process runs never share a port.
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=wait)
        else:
            store, _, size = next(dist.rendezvous("env://", timeout=max(later, JOIN)))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = own_names(store, rank, size, max(later, JOIN))
            # Without torchrun's agent (`srun python -m spmdrl.train`), rank 0 creates a store for each start, so no
            # prefix is needed.
            check_alike(store, rank, where)
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            # Ranks start at different times: the first start on a machine can take a minute.
            timeout=max(later, JOIN),
            device_id=where if where.type == "cuda" else None,
        )
        dist.distributed_c10d._set_pg_timeout(later, dist.group.WORLD)
    return world_from_group(parallel, rollout_tp, where, local_rank, wait)


def own_names(store: dist.Store, rank: int, size: int, wait: timedelta) -> dist.Store:
    """Return the store under a prefix unique to this start. Collective over all ranks of this start.

    torchrun's agent keeps one store across restarts, but a start must not see keys left by an earlier one (addresses of
    dead processes, counters). Ranks have no common restart number, because an agent counts only the restarts that its
    own node requested.

    Rank 0 draws the prefix and answers each request under a key that only the requesting rank reads, until all ranks
    have the prefix. Rank 0 also answers requests from dead processes. These answers are harmless, because torchrun
    starts processes only after all earlier processes have exited. Raises RuntimeError if a rank does not join within
    `wait`.
    """
    joining, me = dist.PrefixStore("joining", store), secrets.token_hex(8)
    if rank:
        # All requests are appended to one value, so that rank 0 gets all of them in one read when their count has
        # grown.
        joining.append("requests", f"{me} ")  # type: ignore[attr-defined]
        joining.add("requested", 1)
        try:
            joining.wait([f"answer/{me}"], wait)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank 0 did not answer within {wait.total_seconds():.0f} s of this rank's start: check its log, and "
                "that every node runs the same command"
            ) from error
        prefix = joining.get(f"answer/{me}").decode()
        joining.add(f"has/{prefix}", 1)
        return dist.PrefixStore(prefix, store)
    until, answered, seen = time.monotonic() + wait.total_seconds(), 0, 0
    while joining.add(f"has/{me}", 0) < size - 1:
        if (count := joining.add("requested", 0)) != seen:
            seen, requests = count, joining.get("requests").decode().split()
            if keys := [f"answer/{name}" for name in requests[answered:]]:
                joining.multi_set(keys, [me] * len(keys))  # type: ignore[attr-defined]
            answered = len(requests)
        if time.monotonic() > until:
            came = f"{joining.add(f'has/{me}', 0) + 1} of {size} ranks came"
            raise RuntimeError(
                f"{came} within {wait.total_seconds():.0f} s: check the logs of the others, and that every node runs "
                "the same command"
            )
        time.sleep(JOIN_POLL)
    return dist.PrefixStore(me, store)


def world_from_group(
    parallel: ParallelConfig,
    rollout_tp: int,
    device: torch.device,
    local_rank: int = 0,
    wait: timedelta = timedelta(seconds=600),
) -> World:
    """Create the world on top of the existing default process group. Collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    roles = roles_of(parallel, size)
    sizes = axis_sizes(parallel, len(roles.trainers))
    kind = device.type
    mesh = _make_mesh(kind, roles.trainers, sizes)
    shard_mesh = _make_shard_mesh(kind, roles.trainers, sizes)
    later = wait + LATER if kind == "cuda" else wait
    data_group, holders = _make_data_group(mesh, later)
    rollout = _make_mesh(kind, roles.samplers, {"engine": len(roles.samplers) // rollout_tp, "tp": rollout_tp})
    host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    # Every rank must take part in creating every group.
    rollout_group = _make_side(roles.samplers, host, wait)
    training_group = _make_side(roles.trainers, host, wait)
    role_group = rollout_group if rank in roles.samplers else training_group
    if roles.scorers not in (roles.trainers, roles.samplers):
        scorers = _make_side(roles.scorers, host, wait)
        role_group = scorers if rank in roles.scorers else role_group
    store = dist.PrefixStore("spmdrl", dist.distributed_c10d._get_default_store())
    meshes = [m for m in (mesh, shard_mesh, rollout) if m.get_coordinate() is not None]
    for group in {g for m in meshes for g in m.get_all_groups()}:
        # Meshes create their groups with torch's default timeout, 30 minutes on gloo. Replace it with the run's.
        dist.distributed_c10d._set_pg_timeout(later, group)
    return World(
        *(rank, size, local_rank, device, host, store, roles, rollout_group, training_group, role_group),
        *(mesh, rollout, shard_mesh, data_group, holders),
    )


def scoring_world(world: World, parallel: ParallelConfig, wait: timedelta) -> World:
    """Return the world for frozen models: `world` itself, unless they have separate ranks. Collective.

    Frozen models are split along Megatron's axes like the policy and sharded over the remaining ranks.
    """
    ranks = world.roles.scorers
    if ranks == world.roles.trainers:
        return world
    sizes = axis_sizes(replace(parallel, dp_replicate=1, dp_shard=-1, sp=1), len(ranks))
    mesh, shard_mesh = (make(world.mesh.device_type, ranks, sizes) for make in (_make_mesh, _make_shard_mesh))
    later = wait + LATER if world.device.type == "cuda" else wait
    data_group, holders = _make_data_group(mesh, later)
    return replace(world, mesh=mesh, shard_mesh=shard_mesh, data_group=data_group, holders=holders)


def twin(world: World, wait: timedelta) -> World:
    """Return a CPU copy of a world with its own process groups, for a background thread. Collective.

    The copy shares its meshes with `world`. Use these meshes to look up positions, but not to communicate.
    """
    with apart_from_default():
        host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    training = _make_side(world.roles.trainers, host, wait)
    groups = dict(host_group=host, training_group=training, role_group=training)
    return replace(world, **groups, device=torch.device("cpu"), is_twin=True)


@contextmanager
def apart_from_default() -> Iterator[None]:
    """Create new groups in this context without splitting them off the default group's NCCL communicator.

    torch splits the communicator if a device is bound to the default group. With a split, ranks outside the new group
    must take part in its creation, too. Creation hangs if they do not, or if the new group uses gloo.
    """
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _make_side(ranks: tuple[int, ...], host: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Create two host-side groups, one for `ranks` and one for the remaining ranks. Return the group that contains this
    rank. Collective over all ranks.

    If `ranks` contains all ranks, returns `host` without creating groups.
    """
    size = dist.get_world_size()
    if len(ranks) == size:
        return host
    sides = [ranks, tuple(r for r in range(size) if r not in ranks)]
    with apart_from_default():
        # Every rank must take part in creating every group.
        both = [dist.new_group(side, backend="gloo", timeout=wait) for side in sides]
    mine = both[dist.get_rank() not in ranks]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _make_mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """Create a mesh with named axes over some ranks of the job. Collective over all ranks."""
    if len(ranks) == dist.get_world_size():
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return DeviceMesh(kind, torch.tensor(ranks).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def _make_shard_mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """Create `World.shard_mesh`, in which the ranks of one sp group are adjacent inside dp_shard. Collective."""
    axes = {axis: sizes[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes["dp_shard"] *= sizes["sp"]
    mesh = _make_mesh(kind, ranks, axes)
    if mesh.get_coordinate() is None:
        return mesh
    return mesh["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else mesh["dp_shard"]


def _make_data_group(mesh: DeviceMesh, wait: timedelta) -> tuple[dist.ProcessGroup | None, torch.Tensor]:
    """Create `World.data_group`. Returns the group and `World.holders`. Collective."""
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
        # Every rank must take part in creating every group.
        group = dist.new_group(ranks, timeout=wait)
        mine = group if dist.get_rank() in ranks else mine
    return mine, holders  # type: ignore[return-value]
