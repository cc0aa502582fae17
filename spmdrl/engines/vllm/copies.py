"""Data parallelism inside one vLLM engine: copies of the attention process different requests and share the experts.

Every layer of experts is collective over the copies, so all copies run each step together; a copy without requests runs
an empty batch (as in `vllm/v1/engine/llm_engine.py` of 0.32). Every rank computes the same assignment of requests to
copies. After each step the copies exchange their tokens, so that every rank of the engine gets every completion. The
CPU build lacks two collectives for this, which this module adds.
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
"""A request's name, the tokens of one step, their logp, and the finish reason if the request finished."""


@contextmanager
def rank_within_engine(cfg: Config, world: World) -> Iterator[None]:
    """With copies, set RANK to this rank's number inside its engine; vLLM reads it at start to find the rank's copy."""
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
    """The assignment of requests to the copies of one engine. All ranks of the engine make the same calls."""

    def __init__(self, cfg: Config, world: World):
        from vllm.distributed.parallel_state import get_dp_group

        self.group: dist.ProcessGroup = get_dp_group().cpu_group
        self.mine = world.engine_tp_rank // cfg.rollout.tp
        self.running = [0] * cfg.rollout.dp
        """Number of requests of each copy."""
        self.copy_of: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Assign a request to the copy with the fewest requests; return True if that is this rank's copy."""
        copy = self.running.index(min(self.running))
        self.running[copy] += 1
        self.copy_of[name] = copy
        return copy == self.mine

    def drop(self, name: str) -> bool:
        """Remove a request that ended; return True if it ran on this rank's copy."""
        copy = self.copy_of.pop(name)
        self.running[copy] -= 1
        return copy == self.mine

    @property
    def idle(self) -> bool:
        """True if this rank's copy has no request."""
        return not self.running[self.mine]

    def exchange(self, rows: list[Row]) -> list[Row]:
        """Return the rows of all copies, in the order of the copies. Collective over the engine."""
        return [tuple(row) for text in all_gather_text(json.dumps(rows), self.group) for row in json.loads(text)]


def _add_cpu_collectives() -> None:
    """Add all-gather and reduce-scatter of parts of different sizes to vLLM's communicator on a CPU."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_, dim: int = 0, sizes: list[int] | None = None):
        if not isinstance(input_, torch.Tensor):
            return [all_gatherv(self, x, dim, sizes) for x in input_]
        assert dim == 0
        counts = sizes or [len(input_)] * self.world_size
        # Parts are padded to the longest, because gloo gathers only equal parts.
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
