"""Process groups and named mesh axes of one run.

Every rank calls `start()` once and gets a `World`: the device, the groups and the axes. Device collectives run on
NCCL (GPU) or gloo (CPU); small host-side agreement always runs on a gloo group of its own.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.config.schema import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Axes of the training mesh, outermost first. Expert parallelism (`ep`) folds out of dp_shard inside a policy."""


@dataclass
class World:
    """What one rank knows of the program it is part of."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: dist.ProcessGroup
    store: dist.Store
    mesh: DeviceMesh
    rollout_mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """True on rank 0; guards output only, never anything that communicates (law 1)."""
        return self.rank == 0

    @property
    def dp_mesh(self) -> DeviceMesh:
        """Axes over which samples are divided: [dp_replicate, dp_shard]."""
        return self.mesh["dp_replicate", "dp_shard"]

    @property
    def engine_index(self) -> int:
        """Which engine (rollout TP group) this rank belongs to."""
        return self.rollout_mesh["engine"].get_local_rank()

    @property
    def engine_count(self) -> int:
        """Number of engines."""
        return self.rollout_mesh["engine"].size()

    @property
    def engine_tp_rank(self) -> int:
        """This rank's place inside its engine; 0 holds the trajectories."""
        return self.rollout_mesh["tp"].get_local_rank()


def axis_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Size of each axis with dp_shard = -1 filled in.

    Raises:
        ValueError: the axes do not multiply to world_size.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
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


def _single_process_environment() -> None:
    """`python -m spmdrl.train` without torchrun is a world of one."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device of this rank: its own GPU, or the CPU."""
    use_gpu = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
    if use_gpu and torch.cuda.device_count() <= local_rank:
        if kind == "cuda":
            raise ValueError(f"--run.device cuda: local rank {local_rank} has no GPU of its own")
        use_gpu = False
    if not use_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


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
    if not dist.is_initialized():
        store = None
        if os.environ["WORLD_SIZE"] == "1":
            # Port 0 lets the system choose, so that two single-process runs never meet.
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=wait)
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank if store else -1,
            world_size=1 if store else -1,
            timeout=wait,
            device_id=where if where.type == "cuda" else None,
        )
    return world_from_group(parallel, rollout_tp, where, local_rank, wait)


def world_from_group(
    parallel: ParallelConfig,
    rollout_tp: int,
    device: torch.device,
    local_rank: int = 0,
    wait: timedelta = timedelta(seconds=600),
) -> World:
    """Axes on top of the default process group, which exists already. Collective."""
    size = dist.get_world_size()
    sizes = axis_sizes(parallel, size)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    rollout = init_device_mesh(device.type, (size // rollout_tp, rollout_tp), mesh_dim_names=("engine", "tp"))
    host = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(host, dist.ProcessGroup)
    store = dist.PrefixStore("spmdrl", dist.distributed_c10d._get_default_store())
    return World(dist.get_rank(), size, local_rank, device, host, store, mesh, rollout)
