"""Hands out prompts to engines, using an atomic counter in the rendezvous store or a fixed assignment."""

import time

import torch
import torch.distributed as dist

from spmdrl.spmd.world import World

POLL_EVERY = 0.1
"""Seconds between reads of the shared counter by an engine that has no newly finished groups."""


class PromptQueue:
    """Hands out the prompt positions 0..n-1 of one rollout, each to exactly one engine.

    Assignment `queue`: the next caller gets the next positions, so an engine that finishes early gets more. Assignment
    `static`: position i belongs to engine i mod engines, regardless of timing (for bit-exact runs).
    All ranks of an engine call `take` together and get the same positions.
    """

    def __init__(self, world: World, n: int, round_name: str, assignment: str):
        self.world, self.n, self.key = world, n, f"queue/{round_name}"
        self.static = assignment == "static"
        self.next = world.engine_index
        self.done = False

    def take(self, want: int) -> list[int]:
        """Return up to `want` positions, or an empty list if none are left or `want` is 0."""
        if self.done or want <= 0:
            return []
        if self.static:
            positions = list(range(self.next, self.n, self.world.engine_count))[:want]
            self.next += len(positions) * self.world.engine_count
        else:
            positions = self._take_from_counter(want)
        self.done = not positions
        return positions

    def _take_from_counter(self, want: int) -> list[int]:
        first = self.world.store.add(self.key, want) - want if self.world.engine_tp_rank == 0 else 0
        first = _of_first_rank(first, self.world)
        return list(range(first, min(first + want, self.n)))


class Tally:
    """Counts a rollout's finished groups until there are enough. All ranks of an engine get the same answer.

    Assignment `queue`: all engines share one counter. An engine without newly finished groups reads the counter only
    every POLL_EVERY seconds, so that a thousand engines do not overload the store. `static`: each engine counts only
    its own groups (for bit-exact runs).
    """

    def __init__(self, world: World, round_name: str, enough: int, assignment: str):
        """Start at 0. enough: the count at which `reached` first returns True, or 0 for never."""
        self.world, self.enough, self.key = world, enough, f"tally/{round_name}"
        self.static, self.count, self.poll_at = assignment == "static", 0, 0.0

    def reached(self, more: int) -> bool:
        """Add `more` to the count, and return True once the count reaches `enough`. Collective over the ranks of an
        engine.
        """
        if not self.enough:
            return False
        if self.static:
            self.count += more
            return self.count >= self.enough
        if self.world.engine_tp_rank == 0 and (more or time.monotonic() >= self.poll_at):
            self.count = self.world.store.add(self.key, more)
            self.poll_at = time.monotonic() + POLL_EVERY
        return _of_first_rank(self.count, self.world) >= self.enough


def _of_first_rank(number: int, world: World) -> int:
    """Broadcast a number from the first rank of an engine to all its ranks (law 1). Collective over these ranks."""
    if world.engine_group is None:
        return number
    box = torch.tensor([number], dtype=torch.int64, device=world.device)
    dist.broadcast(box, group=world.engine_group, group_src=0)
    return int(box.item())
