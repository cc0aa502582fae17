"""Pushes weights into engines: each rank gets the parts that its engine reads, with checksums on both sides (law 5).

Trainer and engine may have any layouts ("3D-HybridEngine", https://arxiv.org/abs/2409.19256): the policy lists the
pieces that a rank holds, the engine the parts that it reads, and `weights/reshard.py` moves the difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from spmdrl.config.engines import Part
from spmdrl.engines.engine import Engine
from spmdrl.engines.needs import Needs
from spmdrl.health.status import tick
from spmdrl.policy.contract import Policy
from spmdrl.spmd.checksum import total_of, word_sums
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.world import World
from spmdrl.weights.folder import Tensors
from spmdrl.weights.reshard import (
    Box,
    CorruptWeightsError,
    Entry,
    Piece,
    Reshard,
    bucket_places,
    catalogue,
    inside,
    size,
)


@dataclass
class PushReport:
    """The bytes that a push brought to this rank."""

    version: int
    bytes: int
    """Bytes that the engine reads on this rank."""
    received: int
    """Bytes that came from other ranks, checksums included."""
    deep: bool
    """True if the engine's own memory was compared, too."""


@dataclass
class Route:
    """The messages by which one part of a policy travels."""

    plan: Reshard
    entries: list[Entry]
    needs: Needs
    """Boxes that this rank's engine reads."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """One sum for each counted tensor, over the words that the last push brought."""

    def __post_init__(self):
        self.counted: dict[str, list[tuple[Box, Box]]] = {}
        """Boxes with sums to compare, by tensor, each with the box of the whole tensor."""
        for (i, box), counted in zip(self.needs.boxes, self.needs.counted, strict=True):
            if counted:
                self.counted.setdefault(self.entries[i].name, []).append((box, self.entries[i].box))

    def count(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add the sums of a bucket's words."""
        self.sums += word_sums(
            inside(x, box, origin) for name, x in tensors.items() for box, origin in self.counted.get(name, ())
        )


class Transfer:
    """The transfer from a policy to its engines, planned at the first push."""

    def __init__(
        self,
        world: World,
        policy: Policy | None,
        engine: Engine | None,
        dtype: torch.dtype,
        bucket_bytes: int,
        parts: tuple[Part, ...] = ("model",),
    ):
        """policy, engine: None on ranks that do not train, or do not sample. dtype: of the engine.

        parts: the parts of a policy that the engine holds. All but the last are pushed only to engines without
        weights.
        """
        self.world, self.policy, self.engine, self.dtype = world, policy, engine, dtype
        self.bucket_bytes, self.parts = bucket_bytes, parts
        self.routes: dict[Part, Route] = {}

    def _pieces(self, part: Part) -> list[Piece]:
        return self.policy.pieces(part) if self.policy else []

    def _route(self, part: Part) -> Route:
        """Plan the messages between the ranks that hold a part and those that read it. Collective."""
        pieces, world = self._pieces(part), self.world
        entries = catalogue(pieces, world.host_group)
        needs = self.engine.needs(entries) if self.engine else Needs()
        plan = Reshard(entries, pieces, needs.boxes, world.host_group, world.device, self.dtype, self.bucket_bytes)
        return Route(plan, entries, needs)

    def _due(self) -> tuple[Part, ...]:
        """Return the parts to push. Collective."""
        if len(self.routes) < len(self.parts) or len(self.parts) == 1:
            return self.parts
        empty = torch.tensor([int(self.engine is not None and self.engine.version is None)])
        return self.parts if int(all_reduce(empty, "max", self.world.host_group)) else self.parts[-1:]

    def push(self, version: int) -> PushReport:
        """Bring every engine to the policy's version. Collective over all ranks.

        Raises:
            CorruptWeightsError: checksums differ, or the engine's memory differs from the push.
        """
        due = self._due()
        for part in due:
            if part not in self.routes:
                self.routes[part] = self._route(part)
        routes = list(self.routes.values())
        deep = all(r.needs.exact for r in routes) and any(any(r.needs.counted) for r in routes)

        def travel() -> Iterator[dict[str, torch.Tensor]]:
            for part in due:
                route = self.routes[part]
                route.sums = []
                for tensors in route.plan.run(self._pieces(part)):
                    if deep:
                        route.count(tensors)
                    yield tensors

        compared = False
        if self.engine is None:
            for _ in travel():
                pass
        else:
            self.engine.load(travel(), version)
            # The comparison covers the engine's whole memory: parts that were not pushed this time must be intact.
            compared = deep and self._compare(routes, f"version {version} after the push")
        plans = [self.routes[part].plan for part in due]
        needed = sum(p.needed_bytes for p in plans) if self.engine else 0
        return PushReport(version, needed, sum(p.received_bytes for p in plans), compared)

    def _compare(self, routes: list[Route], content: str) -> bool:
        """Compare the engine's memory with the sums of the routes; return False if the engine has no sums.

        Raises:
            CorruptWeightsError: they differ; content: the weights, for the message.
        """
        assert self.engine
        held = self.engine.held_words()
        if held is not None and held != total_of([x for route in routes for x in route.sums]):
            self.engine.version = None
            raise CorruptWeightsError(f"the engine's memory does not hold {content}")
        return held is not None

    def load(self, folder: Tensors, version: int) -> int:
        """Load the weights of a folder into this rank's engine in place of the policy's; return the bytes read.

        Collective over the ranks of the engine, after a push, whose parts each rank reads itself.

        Raises:
            CorruptWeightsError: the engine's memory differs from the folder.
        """
        assert self.engine and list(self.routes) == ["model"], "an engine of whole weights, after a push"
        route, device = self.routes["model"], self.world.device
        boxes: dict[int, list[Box]] = {}
        for i, box in route.needs.boxes:
            boxes.setdefault(i, []).append(box)
        places = bucket_places(route.entries, self.dtype.itemsize, self.bucket_bytes)
        deep = route.needs.exact and any(route.needs.counted)
        route.sums, read = [], 0

        def bucket(number: int) -> dict[str, torch.Tensor]:
            nonlocal read
            tick()
            found = {}
            for i, entry in enumerate(route.entries):
                if places[i] == number and i in boxes:
                    dtype = entry.dtype or self.dtype
                    found[entry.name] = torch.empty(entry.shape, dtype=dtype, device=device)
                    for box in boxes[i]:
                        folder.copy(entry.name, box, inside(found[entry.name], box, entry.box))
                        read += size(box) * dtype.itemsize
            if deep:
                route.count(found)
            return found

        # All ranks of the engine have the same number of buckets, some of them empty.
        self.engine.load((bucket(number) for number in range(1 + max(places, default=-1))), version)
        if deep:
            self._compare([route], f"the weights of {folder.folder} after loading")
        return read
