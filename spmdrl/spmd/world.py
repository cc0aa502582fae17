"""The process groups, mesh axes and roles of one rank."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.spmd.peers import Peers
from spmdrl.spmd.roles import AXES, Roles


@dataclass
class World:
    """Device, process groups and mesh axes of one rank, and the roles of all ranks.

    A rank that does not train has no position on the training axes.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: dist.ProcessGroup
    """Host-side group of all ranks, with collectives on the CPU over gloo."""
    store: dist.Store
    roles: Roles
    rollout_group: dist.ProcessGroup
    """Host-side group of the ranks that sample. On a rank that does not sample, the group of all ranks that do not
    sample."""
    training_group: dist.ProcessGroup
    """Host-side group of the ranks that train. On a rank that does not train, the group of all ranks that do not
    train."""
    role_group: dist.ProcessGroup
    """Host-side group of the ranks with this rank's role: all ranks unless the placement is `split`."""
    mesh: DeviceMesh
    """Training axes, over the ranks that train."""
    rollout_mesh: DeviceMesh
    """Axes [engine, tp] over the ranks that sample: a rank's engine, and its position in that engine."""
    shard_mesh: DeviceMesh
    """Axis over which parameters are sharded (dp_shard and sp flattened), preceded by dp_replicate if dp_replicate is
    larger than 1."""
    data_group: dist.ProcessGroup | None = None
    """Ranks that split the samples. The group has one rank for each position on dp_replicate x dp_shard (data
    position), and all of its ranks share this rank's position on the other axes. A rank's index in the group is its
    data position. None if there is only one data position."""
    holders: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))
    """int64 [data positions, copies]: the ranks that hold each data position's samples."""
    is_twin: bool = False
    """True for a twin of another world (`mesh.twin`), which communicates over its own host-side groups."""

    @property
    def is_first(self) -> bool:
        """True on rank 0. This property may guard output, but never communication (law 1, CONTRIBUTING.md)."""
        return self.rank == 0

    @property
    def trains(self) -> bool:
        """True if this rank holds a part of the trained models."""
        return self.rank in self.roles.trainers

    @property
    def scores(self) -> bool:
        """True if this rank holds a part of the frozen models."""
        return self.rank in self.roles.scorers

    @property
    def samples(self) -> bool:
        """True if this rank is part of an engine."""
        return self.rank in self.roles.samplers

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Group of all ranks with the device's backend, or None for a single-rank job."""
        return dist.group.WORLD if self.size > 1 else None

    @property
    def data_peers(self) -> Peers:
        """The ranks of `data_group`, for collectives over the data positions."""
        return Peers(self.data_group, self.device)

    @property
    def data_size(self) -> int:
        """Number of data positions."""
        return len(self.holders)

    @cached_property
    def sp_group(self) -> dist.ProcessGroup | None:
        """Ranks that split the tokens of a packed micro-batch, or None without sequence or context parallelism."""
        return self.mesh.get_group("sp") if self.sp_size > 1 else None

    @cached_property
    def sp_size(self) -> int:
        """Number of ranks that split the tokens of a packed micro-batch."""
        return self.mesh.size(AXES.index("sp"))

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """This rank's shard group, whose ranks together hold every parameter exactly once."""
        return self.shard_mesh.get_group(self.shard_mesh.ndim - 1)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """Axes that split the samples: [dp_replicate, dp_shard]."""
        return self.mesh["dp_replicate", "dp_shard"]

    # The following properties are cached: an engine reads them at every step, and indexing a mesh creates a new mesh.
    @cached_property
    def engine_index(self) -> int:
        """Index of this rank's engine (rollout TP group)."""
        return self.rollout_mesh["engine"].get_local_rank()

    @cached_property
    def engine_count(self) -> int:
        """Number of engines."""
        return self.rollout_mesh["engine"].size()

    @cached_property
    def engine_tp_rank(self) -> int:
        """This rank's position in its engine. The rank at position 0 holds the episodes."""
        return self.rollout_mesh["tp"].get_local_rank()

    @cached_property
    def engine_group(self) -> dist.ProcessGroup | None:
        """Ranks of this rank's engine, or None for a single-rank engine."""
        tp = self.rollout_mesh["tp"]
        return tp.get_group() if tp.size() > 1 else None
