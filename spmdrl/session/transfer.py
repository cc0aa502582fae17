"""Sends weights to engines ("push"): each rank receives the weights that its engine needs, verified by checksums.

Trainer and engine may use different layouts ("3D-HybridEngine", https://arxiv.org/abs/2409.19256): the policy lists the
tensor shards that a rank holds, the engine lists the shards that it needs, and `weights/reshard.py` sends the missing
shards.
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
    """Statistics of a weight push on this rank."""

    version: int
    bytes: int
    """Bytes of weights that the engine needs on this rank."""
    received: int
    """Bytes received from other ranks, including checksums."""
    deep: bool
    """True if the engine's memory was compared with the checksums after loading."""


@dataclass
class Route:
    """Communication plan for one part of a policy (`Part`), such as the base model or the adapter."""

    plan: Reshard
    entries: list[Entry]
    needs: Needs
    """The boxes (rectangular tensor slices) that this rank's engine needs."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Checksums of the last push, one per box in `counted`."""

    def __post_init__(self):
        self.counted: dict[str, list[tuple[Box, Box]]] = {}
        """Maps a tensor name to a list of (box whose checksum is compared, box of the complete tensor)."""
        for (i, box), counted in zip(self.needs.boxes, self.needs.counted, strict=True):
            if counted:
                self.counted.setdefault(self.entries[i].name, []).append((box, self.entries[i].box))

    def count(self, tensors: dict[str, torch.Tensor]) -> None:
        """Append the checksums for a bucket of tensors."""
        self.sums += word_sums(
            inside(x, box, origin) for name, x in tensors.items() for box, origin in self.counted.get(name, ())
        )


class Transfer:
    """Transfers weights from a policy to its engines. The communication is planned at the first push."""

    def __init__(
        self,
        world: World,
        policy: Policy | None,
        engine: Engine | None,
        dtype: torch.dtype,
        bucket_bytes: int,
        parts: tuple[Part, ...] = ("model",),
    ):
        """Create the transfer. policy: None on ranks that do not train. engine: None on ranks that do not sample.

        dtype: dtype of the engine's weights. bucket_bytes: maximum bucket size in bytes. parts: the parts of a policy
        that the engine needs. All parts except the last are sent only if an engine holds no valid weights.
        """
        self.world, self.policy, self.engine, self.dtype = world, policy, engine, dtype
        self.bucket_bytes, self.parts = bucket_bytes, parts
        self.routes: dict[Part, Route] = {}

    def _pieces(self, part: Part) -> list[Piece]:
        return self.policy.pieces(part) if self.policy else []

    def _route(self, part: Part) -> Route:
        """Plan the communication between the ranks that hold a part and the ranks that need it. Collective."""
        pieces, world = self._pieces(part), self.world
        entries = catalogue(pieces, world.host_group)
        needs = self.engine.needs(entries) if self.engine else Needs()
        plan = Reshard(entries, pieces, needs.boxes, world.host_group, world.device, self.dtype, self.bucket_bytes)
        return Route(plan, entries, needs)

    def _due(self) -> tuple[Part, ...]:
        """Return the policy parts that the next push must send. Collective."""
        if len(self.routes) < len(self.parts) or len(self.parts) == 1:
            return self.parts
        empty = torch.tensor([int(self.engine is not None and self.engine.version is None)])
        return self.parts if int(all_reduce(empty, "max", self.world.host_group)) else self.parts[-1:]

    def push(self, version: int) -> PushReport:
        """Send the policy's weights, labelled `version`, to all engines. Collective over all ranks.

        Raises:
            CorruptWeightsError: checksums differ, or the engine's memory does not match the weights that were sent.
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
            # The comparison covers all engine weights, including parts that were not pushed this time.
            compared = deep and self._compare(routes, f"version {version} after the push")
        plans = [self.routes[part].plan for part in due]
        needed = sum(p.needed_bytes for p in plans) if self.engine else 0
        return PushReport(version, needed, sum(p.received_bytes for p in plans), compared)

    def _compare(self, routes: list[Route], content: str) -> bool:
        """Compare the engine's memory with the routes' checksums. Returns False if the engine cannot compute checksums.

        content: description of the weights, for the message.

        Raises:
            CorruptWeightsError: the checksums differ.
        """
        assert self.engine
        held = self.engine.held_words()
        if held is not None and held != total_of([x for route in routes for x in route.sums]):
            self.engine.version = None
            raise CorruptWeightsError(f"the engine's memory does not contain {content}")
        return held is not None

    def load(self, folder: Tensors, version: int) -> int:
        """Replace the policy's weights in this rank's engine with weights from a folder. Returns the bytes read.

        Each rank only reads the boxes that its engine needs. Collective over the ranks of the engine.

        Raises:
            CorruptWeightsError: the engine's memory does not match the folder.
        """
        assert self.engine and list(self.routes) == ["model"], "load needs an engine without adapters, after a push"
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

        # All ranks of the engine must load the same number of buckets, some of which may be empty on some ranks.
        self.engine.load((bucket(number) for number in range(1 + max(places, default=-1))), version)
        if deep:
            self._compare([route], f"the weights of {folder.folder} after loading")
        return read
