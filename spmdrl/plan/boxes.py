"""Computes, on one simulated rank, which weight boxes every rank of a job holds and needs.

A box is a rectangular slice of a weight tensor, given by an index range per dimension. A real job gathers the boxes of
all ranks to decide which training rank sends which weights to which engine. A plan simulates only one rank, so the
models and the engine of that rank also compute the boxes of all other ranks.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from spmdrl.config.engines import Part
from spmdrl.plan.numbers import META
from spmdrl.spmd.world import World
from spmdrl.weights.boxes import Box, Entry, Piece, merged, most_dims, runs, to_rows
from spmdrl.weights.plan import Sets

Boxes = list[Piece]


class Everyone:
    """The boxes of one `Part` that each rank of the job holds, and the boxes that it needs as an engine rank."""

    def __init__(self, world: World, policy: Any, engine: Any, part: Part):
        """policy: computes all training ranks' boxes. engine: maps a rank within an engine to a simulated engine."""
        self.world, self.part = world, part
        self.pieces: list[Boxes] = []
        """Distinct lists of pieces that ranks hold, the first one empty. A `Piece` is a box plus its tensor's name."""
        self.holds = np.zeros(world.size, dtype=np.int64)
        held = of_megatron(world, policy) if hasattr(policy, "chunks") else of_fsdp(world, policy, part)
        self.pieces.append([])
        for ranks, pieces in held:
            self.holds[ranks] = len(self.pieces)
            self.pieces.append(pieces)
        names: dict[str, Entry] = {}
        for pieces in self.pieces:
            for p in pieces:
                names.setdefault(p.name, Entry(p.name, p.shape, p.tensor.dtype if p.exact else None))
        self.entries = list(names.values())
        self.index = {name: i for i, name in enumerate(names)}
        self.dims = most_dims(self.entries)
        self.engine = engine

    def held(self) -> Sets:
        """Return the boxes that each rank of the job holds."""
        return Sets([self._rows([(self.index[p.name], p.box) for p in pieces]) for pieces in self.pieces], self.holds)

    def wanted(self) -> Sets:
        """Return the boxes that each rank needs, computed for one engine, as all engines need the same boxes."""
        samplers = self.world.roles.samplers
        width = self.world.rollout_mesh.size(1)
        of = np.zeros(self.world.size, dtype=np.int64)
        sets = [self._rows([])]
        alike, first = self._alike()
        like = [self.entries[i] for i in first]
        for place in range(width):
            of[list(samplers[place::width])] = len(sets)
            sets.append(self._spread(merged(self.engine(place).needs(like).boxes), alike))
        return Sets(sets, of)

    def _alike(self) -> tuple[np.ndarray, list[int]]:
        """Group tensors of equal shape whose names differ only in the layer index; an engine shards them the same way.

        Layers that the engine skips (multi-token prediction) are grouped separately.

        Return the group index of each tensor, int64 [tensors], and the index of the first tensor in each group.
        """
        numbers: dict[tuple, int] = {}
        first, of = [], np.zeros(len(self.entries), dtype=np.int64)
        for i, entry in enumerate(self.entries):
            found = re.search(r"\.layers\.(\d+)\.", entry.name)
            beyond = bool(found) and int(found[1]) >= self.engine(0).layout.layers
            key = re.sub(r"\.layers\.\d+\.", ".layers.N.", entry.name), entry.shape, beyond
            if key not in numbers:
                numbers[key] = len(first)
                first.append(i)
            of[i] = numbers[key]
        return of, first

    def _spread(self, boxes: list[tuple[int, Box]], alike: np.ndarray) -> np.ndarray:
        """Copy the boxes of each group's first tensor to all its tensors; return unique boxes, sorted, one per row."""
        few = to_rows(boxes, self.dims)
        parts = []
        order = np.argsort(alike, kind="stable")
        starts = np.searchsorted(alike[order], few[:, 0], "left")
        ends = np.searchsorted(alike[order], few[:, 0], "right")
        for row, start, end in zip(few, starts, ends, strict=True):
            many = np.repeat(row[None], end - start, 0)
            many[:, 0] = order[start:end]
            parts.append(many)
        rows = np.concatenate(parts) if parts else few
        order, begins = runs(rows)
        return rows[order[begins]]

    def _rows(self, boxes: list[tuple[int, Box]]) -> np.ndarray:
        rows = to_rows(boxes, self.dims)
        order, begins = runs(rows)
        return rows[order[begins]]


def of_fsdp(world: World, policy: Any, part: Part) -> Iterator[tuple[list[int], Boxes]]:
    """Yield, shard by shard of an FSDP model, the ranks that hold the shard and their pieces."""
    from spmdrl.policy.fsdp import lora
    from spmdrl.weights import shards

    count = world.shard_mesh.size(world.shard_mesh.ndim - 1)
    places = np.arange(len(world.roles.trainers)).reshape(*world.mesh.mesh.shape)
    # A model is sharded over dp_shard and sp combined; ranks along the other axes hold replicas.
    places = np.moveaxis(places, (2, 3), (-2, -1)).reshape(-1, count)
    for index in range(count):

        def box(param: torch.Tensor, index: int = index) -> Box:
            rows = shards.shard_rows(param.shape[0], count, index)
            return (rows, *((0, n) for n in param.shape[1:]))

        def local(param: torch.Tensor, box: Callable = box) -> torch.Tensor:
            return torch.empty([b - a for a, b in box(param)], dtype=param.dtype, device=META)

        sharded = patch.multiple(
            shards, shard_box=_or_whole(box, shards.shard_box), local=_or_whole(local, shards.local)
        )
        own: dict[str, Any] = dict(shard_box=_or_whole(box, lora.shard_box), local=_or_whole(local, lora.local))
        also = patch.multiple(lora, **own, gathered=_whole)
        with sharded, also:
            yield [world.roles.trainers[i] for i in places[:, index]], policy.pieces(part)


def _or_whole(function: Callable, plain: Callable) -> Callable:
    """Return a function that applies `function` to sharded parameters and `plain` to all others."""
    from torch.distributed.tensor import DTensor

    return lambda param: function(param) if isinstance(param, DTensor) else plain(param)


def _whole(named: list[tuple[str, Any]], _: World) -> dict[str, torch.Tensor]:
    return {name: torch.empty(p.shape, dtype=p.dtype, device=META) for name, p in named}


class Place(SimpleNamespace):
    """Stands in for a process group in code that reads only the group's size and this process's rank."""

    size: Callable[[], int]
    rank: Callable[[], int]


def _place(size: int, rank: int) -> Place:
    return Place(size=lambda: size, rank=lambda: rank)


def of_megatron(world: World, policy: Any) -> Iterator[tuple[list[int], Boxes]]:
    """Yield each set of ranks that hold the same pieces, together with those pieces.

    Ranks hold the same pieces if they are in the same pipeline stage and have the same tp, etp and ep ranks.
    """
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel import utils
    from megatron.core.transformer import transformer_block, transformer_layer

    from spmdrl.policy.megatron import convert
    from spmdrl.policy.megatron.model import build

    grid, trainers = policy.grid, np.array(world.roles.trainers)
    stages = trainers.reshape(grid.pp, -1)
    pipeline, own = state.get_pipeline_model_parallel_group(), state.get_pipeline_model_parallel_rank()
    for stage in range(grid.pp):
        state.set_pipeline_model_parallel_rank(stage)

        def place(group: Any = None, stage: int = stage) -> int:
            return stage if group is pipeline else group.rank()

        with ExitStack() as stack:
            for module in (transformer_block, transformer_layer, utils):
                stack.enter_context(patch.object(module, "get_pg_rank", place))
            chunks = build(policy.hf_config, None, grid, policy.compute, META, policy.head)
        local = np.arange(stages.shape[1])
        tp, etp, ep = local % grid.tp, local % grid.etp, local // grid.etp % grid.ep
        for key in sorted(set(zip(tp.tolist(), etp.tolist(), ep.tolist(), strict=True))):
            here = (tp == key[0]) & (etp == key[1]) & (ep == key[2])
            for chunk in chunks:
                model = convert.unwrapped(chunk)
                model.pg_collection = SimpleNamespace(
                    tp=_place(grid.tp, key[0]), expt_tp=_place(grid.etp, key[1]), ep=_place(grid.ep, key[2])
                )
            yield stages[stage][here].tolist(), convert.pieces(chunks)
    state.set_pipeline_model_parallel_rank(own)
