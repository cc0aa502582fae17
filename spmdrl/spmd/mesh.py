"""Process groups and named mesh axes of one run.

Every rank calls `start()` once and gets a `World`: the device, the groups and the axes. Device collectives run on
NCCL (GPU) or gloo (CPU); small host-side agreement always runs on a gloo group of its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.config.schema import ParallelConfig
from spmdrl.spmd.devices import check_alike, pick_device
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.rendezvous import own_names

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Axes of the training mesh, outermost first. `sp` is what divides a pack's tokens: Ulysses, or context parallelism.
Expert parallelism folds out of the others inside a policy."""


JOIN = timedelta(seconds=120)
"""Least time that ranks wait for each other at the start."""
LATER = timedelta(seconds=60)
"""NCCL's own end of a job comes so much after `--run.timeout`: it names no rank (`failure.watch` does)."""


@dataclass(frozen=True)
class Roles:
    """Which ranks train, score and sample. `colocated`: all do all three; `split`: disjoint sets, in this order.

    Scorers hold the frozen models; without ranks of their own these live with the trainers.
    """

    trainers: tuple[int, ...]
    scorers: tuple[int, ...]
    samplers: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Those who sample are others than those who train."""
        return self.samplers != self.trainers


@dataclass
class World:
    """What one rank knows of the program it is part of.

    On a rank that does not train, the training axes are those of others: it has no place on them.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: dist.ProcessGroup
    store: dist.Store
    roles: Roles
    rollout_group: dist.ProcessGroup
    """Host-side group of all ranks that sample (on others: of those that do not)."""
    training_group: dist.ProcessGroup
    """Host-side group of all ranks that train (on others: of those that do not)."""
    role_group: dist.ProcessGroup
    """Host-side group of the ranks that do what this one does: all of them unless the placement is `split`."""
    mesh: DeviceMesh
    """Training axes, over the ranks that train."""
    rollout_mesh: DeviceMesh
    """[engine, tp], over the ranks that sample."""
    shard_mesh: DeviceMesh
    """What parameters are sharded over: dp_shard x sp flattened, behind dp_replicate where that is more than one."""
    data_group: dist.ProcessGroup | None = None
    """Ranks over which samples are divided: one of each data position, all at this rank's place in the other axes. None
    for a single position. Group rank = data position."""
    holders: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))
    """int64 [data positions, copies]: the ranks that hold the samples of each position."""
    apart: bool = False
    """A twin of another world (`twin`): all that it moves goes over host-side groups of its own."""

    @property
    def is_first(self) -> bool:
        """True on rank 0; guards output only, never anything that communicates (law 1)."""
        return self.rank == 0

    @property
    def trains(self) -> bool:
        """This rank holds a part of the models that learn."""
        return self.rank in self.roles.trainers

    @property
    def scores(self) -> bool:
        """This rank holds a part of the frozen models."""
        return self.rank in self.roles.scorers

    @property
    def samples(self) -> bool:
        """This rank is part of an engine."""
        return self.rank in self.roles.samplers

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks, with the device's backend; None for a world of one."""
        return dist.group.WORLD if self.size > 1 else None

    @property
    def data_peers(self) -> Peers:
        """Ranks that hold the other data positions."""
        return Peers(self.data_group, self.device)

    @property
    def data_size(self) -> int:
        """Data positions: into how many shares samples are divided."""
        return len(self.holders)

    @cached_property
    def sp_group(self) -> dist.ProcessGroup | None:
        """Ranks that divide the tokens of one pack; None without sequence parallelism."""
        return self.mesh.get_group("sp") if self.sp_size > 1 else None

    @cached_property
    def sp_size(self) -> int:
        """Ranks that divide the tokens of one pack."""
        return self.mesh.size(AXES.index("sp"))

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that together hold every parameter once."""
        return self.shard_mesh.get_group(self.shard_mesh.ndim - 1)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """Axes over which samples are divided: [dp_replicate, dp_shard]."""
        return self.mesh["dp_replicate", "dp_shard"]

    # Kept: they are asked for at every step of an engine, and each time a mesh would make a mesh of its part.
    @cached_property
    def engine_index(self) -> int:
        """Which engine (rollout TP group) this rank belongs to."""
        return self.rollout_mesh["engine"].get_local_rank()

    @cached_property
    def engine_count(self) -> int:
        """Number of engines."""
        return self.rollout_mesh["engine"].size()

    @cached_property
    def engine_tp_rank(self) -> int:
        """This rank's place inside its engine; 0 holds the episodes."""
        return self.rollout_mesh["tp"].get_local_rank()

    @cached_property
    def engine_group(self) -> dist.ProcessGroup | None:
        """Ranks of this rank's engine; None for an engine of one."""
        tp = self.rollout_mesh["tp"]
        return tp.get_group() if tp.size() > 1 else None


def axis_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Size of each axis with dp_shard = -1 filled in.

    Raises:
        ValueError: the axes do not multiply to world_size.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    sizes["sp"] *= parallel.cp
    rest = 1
    for axis, size in sizes.items():
        rest *= size if axis != "dp_shard" else 1
    if sizes["dp_shard"] == -1:
        if world_size % rest:
            raise ValueError(f"the other parallel axes multiply to {rest}, which does not divide {world_size} ranks")
        sizes["dp_shard"] = world_size // rest
    if rest * sizes["dp_shard"] != world_size:
        raise ValueError(f"parallel axes {sizes} multiply to {rest * sizes['dp_shard']}, not to {world_size} ranks")
    return sizes


def roles_of(parallel: ParallelConfig, world_size: int) -> Roles:
    """Who does what.

    Raises:
        ValueError: no rank is left to train.
    """
    everyone = tuple(range(world_size))
    if parallel.placement == "colocated":
        return Roles(everyone, everyone, everyone)
    trainers = world_size - parallel.rollout_ranks - parallel.scoring_ranks
    if trainers < 1 or parallel.rollout_ranks < 1:
        raise ValueError(
            f"--parallel.placement split: {parallel.rollout_ranks} of {world_size} ranks sample and "
            f"{parallel.scoring_ranks} score, which leaves {max(trainers, 0)} to train; every role needs a rank"
        )
    first = world_size - parallel.rollout_ranks
    scorers = everyone[trainers:first] or everyone[:trainers]
    return Roles(everyone[:trainers], scorers, everyone[first:])


def _single_process_environment() -> None:
    """`python -m spmdrl.train` without torchrun is a world of one."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")


def start(parallel: ParallelConfig, rollout_tp: int, device: str = "auto", timeout: float = 600.0) -> World:
    """Join the world. Collective: every rank calls it with the same arguments.

    Args:
        parallel: sizes of the training axes.
        rollout_tp: ranks per engine.
        device: `auto`, `cpu` or `cuda`.
        timeout: seconds a collective may wait.
    """
    _single_process_environment()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    where = pick_device(device, local_rank)
    wait = timedelta(seconds=timeout)
    later = wait + LATER if where.type == "cuda" else wait
    if not dist.is_initialized():
        if os.environ["WORLD_SIZE"] == "1":
            # Port 0 lets the system choose, so that two single-process runs never meet.
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=wait)
        else:
            store, _, size = next(dist.rendezvous("env://", timeout=max(later, JOIN)))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = own_names(store, rank, size, max(later, JOIN))
            # Without an agent (`srun python -m spmdrl.train`) rank 0 makes the store, which no earlier start has seen.
            check_alike(store, rank, where)
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            # Ranks begin at different times: a machine's first start may take a minute.
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
    """Axes on top of the default process group, which exists already. Collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    roles = roles_of(parallel, size)
    sizes = axis_sizes(parallel, len(roles.trainers))
    kind = device.type
    mesh = _mesh(kind, roles.trainers, sizes)
    shard_mesh = _shard_mesh(kind, roles.trainers, sizes)
    later = wait + LATER if kind == "cuda" else wait
    data_group, holders = _data_group(mesh, later)
    rollout = _mesh(kind, roles.samplers, {"engine": len(roles.samplers) // rollout_tp, "tp": rollout_tp})
    host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    # Every rank makes every group.
    rollout_group = _side(roles.samplers, host, wait)
    training_group = _side(roles.trainers, host, wait)
    role_group = rollout_group if rank in roles.samplers else training_group
    if roles.scorers not in (roles.trainers, roles.samplers):
        scorers = _side(roles.scorers, host, wait)
        role_group = scorers if rank in roles.scorers else role_group
    store = dist.PrefixStore("spmdrl", dist.distributed_c10d._get_default_store())
    meshes = [m for m in (mesh, shard_mesh, rollout) if m.get_coordinate() is not None]
    for group in {g for m in meshes for g in m.get_all_groups()}:
        # Meshes give theirs the library's own limit, half an hour on gloo.
        dist.distributed_c10d._set_pg_timeout(later, group)
    return World(
        *(rank, size, local_rank, device, host, store, roles, rollout_group, training_group, role_group),
        *(mesh, rollout, shard_mesh, data_group, holders),
    )


def scoring_world(world: World, wait: timedelta) -> World:
    """The world as frozen models see it that have ranks of their own: sharded over those. Collective.

    Where they share the ranks of the trainers it is the world itself.
    """
    ranks = world.roles.scorers
    if ranks == world.roles.trainers:
        return world
    sizes = dict.fromkeys(AXES, 1) | {"dp_shard": len(ranks)}
    mesh, shard_mesh = (make(world.device.type, ranks, sizes) for make in (_mesh, _shard_mesh))
    later = wait + LATER if world.device.type == "cuda" else wait
    data_group, holders = _data_group(mesh, later)
    return replace(world, mesh=mesh, shard_mesh=shard_mesh, data_group=data_group, holders=holders)


def twin(world: World, wait: timedelta) -> World:
    """The same ranks and axes on the host, with groups of its own: for a thread that works beside the program.

    Collective. Meshes are shared: they may be asked for places, not be communicated over.
    """
    with apart_from_default():
        host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    training = _side(world.roles.trainers, host, wait)
    groups = dict(host_group=host, training_group=training, role_group=training)
    return replace(world, **groups, device=torch.device("cpu"), apart=True)


@contextmanager
def apart_from_default() -> Iterator[None]:
    """Groups made inside are not split off the default group's NCCL communicator.

    torch splits where a device is bound to it, and then ranks that are not in a group take part in making it: someone
    waits for ever where the group's own are on gloo, or where the others are not asked at all.
    """
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _side(ranks: tuple[int, ...], host: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Host-side group of some ranks, on the others that of the others. Collective over all of them."""
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


def _mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """Named axes over some ranks of the job. Collective over all of them."""
    if len(ranks) == dist.get_world_size():
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return DeviceMesh(kind, torch.tensor(ranks).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def _shard_mesh(kind: str, ranks: tuple[int, ...], sizes: dict[str, int]) -> DeviceMesh:
    """See `World.shard_mesh`: ranks of one sp group stand next to each other inside dp_shard. Collective."""
    axes = {axis: sizes[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes["dp_shard"] *= sizes["sp"]
    mesh = _mesh(kind, ranks, axes)
    if mesh.get_coordinate() is None:
        return mesh
    return mesh["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else mesh["dp_shard"]


def _data_group(mesh: DeviceMesh, wait: timedelta) -> tuple[dist.ProcessGroup | None, torch.Tensor]:
    """See `World.data_group` and `World.holders`. Collective."""
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
