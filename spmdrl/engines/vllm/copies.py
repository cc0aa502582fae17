"""Data parallelism inside one vLLM engine: attention replicas process different requests and share the experts.

Expert layers communicate across the replicas, so all replicas (`Copies`) run each step together, and a replica without
requests runs an empty batch (as in `vllm/v1/engine/llm_engine.py` of 0.32). Every rank computes the same assignment of
requests to replicas. After each step the replicas exchange their tokens, so that every rank of the engine gets every
completion. This module also adds two collectives that the CPU build lacks.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config.schema import Config
from spmdrl.engines.engine import Finish
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.world import World

Row = tuple[str, list[int], list[float], Finish | None]
"""A request's name, its tokens from one step, their logp, and the finish reason if the request has finished."""


@contextmanager
def rank_within_engine(cfg: Config, world: World) -> Iterator[None]:
    """With replicas, set RANK to this rank's index in its engine. At startup, vLLM uses RANK to find its replica."""
    before = os.environ.get("RANK", "0")
    if cfg.rollout.dp > 1:
        os.environ["RANK"] = str(world.engine_tp_rank)
        if world.device.type == "cpu":
            _add_cpu_collectives()
    try:
        yield
    finally:
        os.environ["RANK"] = before


class Copies:
    """The assignment of requests to the replicas of one engine. All ranks of the engine make the same calls."""

    def __init__(self, cfg: Config, world: World):
        from vllm.distributed.parallel_state import get_dp_group

        self.group: dist.ProcessGroup = get_dp_group().cpu_group
        self.mine = world.engine_tp_rank // cfg.rollout.tp
        self.running = [0] * cfg.rollout.dp
        """Number of requests on each replica."""
        self.copy_of: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Assign a request to the replica with the fewest requests. Returns True if this is the rank's own replica."""
        copy = self.running.index(min(self.running))
        self.running[copy] += 1
        self.copy_of[name] = copy
        return copy == self.mine

    def drop(self, name: str) -> bool:
        """Remove a finished request, and return True if the request ran on this rank's replica."""
        copy = self.copy_of.pop(name)
        self.running[copy] -= 1
        return copy == self.mine

    @property
    def idle(self) -> bool:
        """True if this rank's replica has no requests."""
        return not self.running[self.mine]

    def exchange(self, rows: list[Row]) -> list[Row]:
        """Return the rows of all replicas, in replica order. Collective over the engine."""
        return [tuple(row) for text in all_gather_text(json.dumps(rows), self.group) for row in json.loads(text)]


def _add_cpu_collectives() -> None:
    """Add all-gather and reduce-scatter with uneven sizes to vLLM's CPU communicator."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_, dim: int = 0, sizes: list[int] | None = None):
        if not isinstance(input_, torch.Tensor):
            return [all_gatherv(self, x, dim, sizes) for x in input_]
        assert dim == 0
        counts = sizes or [len(input_)] * self.world_size
        # Inputs are padded to the longest, because gloo only gathers equal sizes.
        padded = input_.new_zeros(max(counts), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None):
        assert dim == 0
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(counts)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
