"""The world of one simulated rank of a job: groups that send nothing, axes as in a real job."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config.schema import Config
from spmdrl.plan.numbers import META
from spmdrl.plan.traffic import Traffic
from spmdrl.spmd.mesh import world_from_group
from spmdrl.spmd.roles import AXES
from spmdrl.spmd.world import World


def open_world(cfg: Config, rank: int, size: int) -> World:
    """Make this process one rank of `size`; its device is torch's meta device."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return replace(world_from_group(cfg.parallel, cfg.engine_ranks, torch.device("cpu")), device=META)


def name_axes(traffic: Traffic, cfg: Config, world: World) -> None:
    """Name the axes of this rank's groups. If several axes share one group, the last name stays."""
    everyone: Any = dist.group.WORLD
    traffic.call(everyone, "all ranks")
    if world.data_group is not None:
        traffic.call(world.data_group, "data")
    if world.trains:
        for axis in AXES:
            traffic.call(world.mesh.get_group(axis), axis)
        for axis in range(world.shard_mesh.ndim):
            name = ("dp_replicate", "dp_shard")[axis - world.shard_mesh.ndim]
            traffic.call(world.shard_mesh.get_group(axis), name)
    if cfg.policy.backend == "megatron" and world.trains:
        from megatron.core import parallel_state as state

        groups = {
            "data": [state.get_data_parallel_group(), state.get_data_parallel_group(with_context_parallel=True)],
            "expert data": [state.get_expert_data_parallel_group()],
            "cp": [state.get_context_parallel_group()],
            "tp x ep": [state.get_expert_tensor_and_model_parallel_group()],
            "ep": [state.get_expert_model_parallel_group()],
            "tp": [state.get_tensor_model_parallel_group()],
            "pp": [state.get_pipeline_model_parallel_group(), state.get_embedding_group(check_initialized=False)],
        }
        for axis, several in groups.items():
            for group in several:
                # Stages in the middle hold no part of the embedding.
                if group is not None:
                    traffic.call(group, axis)
