"""New weights into the engine: each rank gets what its engine reads, with a version and checksums on both sides (law 5).

From any layout of the trainer to any of the engine ("3D-HybridEngine", https://arxiv.org/abs/2409.19256): the policy says
which pieces a rank holds, the engine which parts it reads, and `spmd/reshard.py` moves the difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmdrl.policy.contract import Policy
from spmdrl.rollout.engine import Engine
from spmdrl.rollout.needs import Needs
from spmdrl.spmd.digest import word_sum
from spmdrl.spmd.mesh import World
from spmdrl.spmd.reshard import CorruptWeightsError, Entry, Reshard, catalogue, inside


@dataclass
class PushReport:
    """What one push brought to this rank."""

    version: int
    bytes: int
    """That its engine reads here."""
    received: int
    """That came from other ranks, checksums included."""
    deep: bool
    """True when the engine's own memory was compared too."""


class Transfer:
    """The way from a policy to its engines, planned at the first push."""

    def __init__(
        self, world: World, policy: Policy | None, engine: Engine | None, dtype: torch.dtype, bucket_bytes: int
    ):
        """policy, engine: None on ranks that do not train, or do not sample. dtype: of the engine."""
        self.world, self.policy, self.engine, self.dtype = world, policy, engine, dtype
        self.bucket_bytes = bucket_bytes
        self.plan: Reshard | None = None
        self.entries: list[Entry] = []
        self.needs = Needs()

    def _pieces(self):
        return self.policy.pieces() if self.policy else []

    def _plan(self) -> Reshard:
        """Who holds what, and who reads what. Collective."""
        pieces, world = self._pieces(), self.world
        self.entries = catalogue(pieces, world.host_group)
        if self.engine:
            self.needs = self.engine.needs(self.entries)
        return Reshard(
            self.entries,
            pieces,
            self.needs.boxes,
            world.host_group,
            world.device,
            self.dtype,
            self.bucket_bytes,
        )

    def push(self, version: int) -> PushReport:
        """Bring every engine to the policy's version. Collective over all ranks.

        Raises:
            CorruptWeightsError: checksums differ, or the engine's memory does not hold what was pushed.
        """
        if self.plan is None:
            self.plan = self._plan()
        pieces = self._pieces()
        if self.engine is None:
            for _ in self.plan.run(pieces):
                pass
            return PushReport(version, 0, self.plan.received_bytes, False)
        engine, sent_words = self.engine, 0
        deep = self.needs.exact and any(self.needs.counted)
        parts: dict[str, list] = {}
        for (i, box), counted in zip(self.needs.boxes, self.needs.counted, strict=True):
            if counted:
                parts.setdefault(self.entries[i].name, []).append(box)

        def summed() -> Iterator[dict[str, torch.Tensor]]:
            nonlocal sent_words
            assert self.plan is not None
            for tensors in self.plan.run(pieces):
                if deep:
                    sent_words += word_sum(inside(x, box) for name, x in tensors.items() for box in parts.get(name, ()))
                yield tensors

        engine.load(summed(), version)
        held = engine.held_words() if deep else None
        if held is not None and held != sent_words % (1 << 64):
            engine.version = None
            raise CorruptWeightsError(f"the engine's memory does not hold version {version} after the push")
        return PushReport(version, self.plan.needed_bytes, self.plan.received_bytes, held is not None)
