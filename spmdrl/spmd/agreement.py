"""Checks once a step that all ranks ran the same number of collectives and hold equal values.

A mismatch means that a rank broke law 1 (CONTRIBUTING.md). To compare, ranks all-reduce a few integers over a separate
process group, so that a mismatched collective in another group cannot interfere. The error lists groups, ranks and
counts. The source lines are in the flight record (`health/flight_record.py`). The same all-reduce tells all ranks
whether one of them has been asked to leave.
"""

import hashlib
import json
from datetime import timedelta

import torch
import torch.distributed as dist

from spmdrl.health.flight_record import collectives_of
from spmdrl.spmd.exchange import all_gather_alike, all_gather_text, all_reduce, gather_names
from spmdrl.spmd.lockstep import LockstepError
from spmdrl.spmd.world import World

NEVER = -(1 << 62)


def groups_of(world: World) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of a world that contain this rank and at least one other, keyed by name and ranks."""
    groups = [world.group, world.host_group, world.rollout_group, world.training_group, world.role_group]
    groups.append(world.data_group)
    for mesh in (world.mesh, world.shard_mesh, world.rollout_mesh):
        if mesh.get_coordinate() is not None:
            groups += mesh.get_all_groups()
    found = {}
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            ranks = dist.get_process_group_ranks(group)
            # Every rank creates every group, so a group has the same name on all its ranks.
            found[f"{group.group_name} of ranks {rank_ranges(ranks)}"] = group
    return found


def rank_ranges(ranks: list[int], most: int = 8) -> str:
    """Format ascending ranks as text such as `0-7, 9`: at most `most` ranges, then the number of remaining ranks."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = [f"{a}-{b}" if b - a > 1 else ", ".join(map(str, range(a, b + 1))) for a, b in ranges[:most]]
    left = sum(b - a + 1 for a, b in ranges[most:])
    return ", ".join(parts) + (f" and {left} more" if left else "")


def value_hash(value: object) -> int:
    """Return a 62-bit hash of a JSON-serialisable value."""
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class Agreement:
    """Checks once a step that all ranks ran the same number of collectives per group and hold equal shared values.

    Construction is collective: every rank must construct it, after all process groups exist.
    """

    def __init__(self, world: World, timeout: float):
        """Create a process group for the comparison. timeout: maximum seconds that a rank waits for another rank."""
        self.world, self.own = world, world.host_group
        self.groups = groups_of(world)
        self.names = gather_names(self.groups, world.host_group)
        if world.size > 1:
            own = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            assert isinstance(own, dist.ProcessGroup)
            self.own = own

    def __call__(self, values: dict[str, object], leave: bool = False) -> bool:
        """Compare the ranks, and return True if any rank has been asked to leave. Collective.

        values: name -> JSON-serialisable value that must be equal on all ranks. Every rank passes the same names.
        leave: True if this rank has been asked to leave. Raises LockstepError on every rank if ranks differ. The
        message lists the differences.
        """
        counts = {name: collectives_of(group) for name, group in self.groups.items()}
        facts = [value_hash(value) for value in values.values()] + [counts.get(name, NEVER) for name in self.names]
        # One max-reduction yields the maximum and the minimum of each fact, because the minimum is the negated maximum
        # of the negated fact.
        least = [-fact if fact != NEVER else NEVER for fact in facts]
        row = torch.tensor([int(leave), *facts, *least])
        all_reduce(row, "max", self.own if self.world.size > 1 else None)
        wanted, *extremes = row.tolist()
        high, low = extremes[: len(facts)], extremes[len(facts) :]
        differ = [i for i, (most, minus) in enumerate(zip(high, low, strict=True)) if most != -minus and most != NEVER]
        if differ:
            self._explain(values, facts, differ)
        return bool(wanted)

    def _explain(self, values: dict[str, object], facts: list[int], differ: list[int]) -> None:
        rows = all_gather_alike(torch.tensor([facts]), self.own)[:, 0].tolist()
        names = list(values)
        texts = all_gather_text(json.dumps(list(values.values())), self.own)
        differences = []
        for i in differ:
            if i < len(names):
                by_rank = [str(json.loads(text)[i]) for text in texts]
                what, unit = f"{names[i]} is", ""
            else:
                by_rank = [str(row[i]) if row[i] != NEVER else "" for row in rows]
                what, unit = f"group {self.names[i - len(names)]} has run", " collectives"
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(by_rank):
                if value:
                    ranks.setdefault(value, []).append(rank)
            parts = [
                f"{value}{unit} on rank{'s' if len(holders) > 1 else ''} {rank_ranges(holders)}"
                for value, holders in ranks.items()
            ]
            differences.append(f"{what} {', but '.join(parts)}")
        raise LockstepError(
            f"ranks went different ways in this step: {'; '.join(differences)}. Somewhere a rank decides alone whether "
            "to communicate (law 1): `python -m spmdrl.tools.flight` on the run folder shows the lines, and "
            "--run.lockstep-debug stops at the first difference"
        )
