"""Determines the order in which a job draws prompts and rows. The order is the same on all ranks and after a resume.

For given sources, the order depends only on the seed and on the number of rows drawn so far (law 3). Prompts and the
rows of indexed sources are reshuffled every epoch, unless shuffling is off. A stream is split into blocks, each
shuffled in memory. With weights, each row comes from the source that is furthest behind its share, so that every
stretch of rows follows the mixture. Without weights, sources are concatenated and shuffled together.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from spmdrl.data.row_columns import Row
from spmdrl.data.rowfiles import Indexed, Streamed
from spmdrl.spmd.seeds import generator_for

BLOCK = 10_000
"""Number of stream rows that are shuffled together in memory."""
_STREAM = 0x57EA  # key component that separates block permutations from other draws


Key = tuple[str, int]
"""An indexed source's name and the index of one of its rows."""


_ORDER = 0x0DE4  # key component that separates an epoch's order from draws keyed by (seed, small number)


@lru_cache(maxsize=4)
def _epoch_order(n_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n_prompts))
    generator_for(seed, _ORDER, epoch).shuffle(order)
    return tuple(order)


def drawn_indices(n_prompts: int, first: int, count: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return the prompt indices of a run's draws `first` .. `first + count - 1`.

    Each epoch is one permutation of all prompts, or the original order without `shuffle`. Draws that cross into another
    epoch can contain an index twice. Raises ValueError if there are no prompts, or `first` or `count` is negative.
    """
    if n_prompts < 1 or count < 0 or first < 0:
        raise ValueError(f"cannot draw {count} of {n_prompts} prompts after {first}")
    if not shuffle:
        return [i % n_prompts for i in range(first, first + count)]
    places = (divmod(i, n_prompts) for i in range(first, first + count))
    return [_epoch_order(n_prompts, seed, epoch)[place] for epoch, place in places]


@dataclass
class Drawn:
    """One drawn row. A row of an indexed source is read only when `read` is called."""

    where: str
    """Location of the row in its source, for messages."""
    read: Callable[[], dict]
    """Function that returns the row; raises ValueError if it cannot be read."""
    key: Key | None = None
    """Source and index of the row, or None for a stream's row."""


class Permuted:
    """Concatenated rows of indexed sources; `shuffle` reshuffles them every epoch."""

    def __init__(self, sources: list[Indexed], seed: int, shuffle: bool = True):
        """shuffle: False to draw the rows in the order of the sources."""
        self.sources, self.seed, self.shuffle, self.drawn = sources, seed, shuffle, 0
        self.ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self.ends[-1]

    def draw(self) -> Drawn:
        """Return the next row."""
        (index,) = drawn_indices(len(self), self.drawn, 1, self.seed, self.shuffle)
        self.drawn += 1
        number = bisect_right(self.ends, index)
        source, row = self.sources[number], index - (self.ends[number - 1] if number else 0)
        folder = str(Path(source.name).parent)
        return Drawn(source.where(row), lambda: Row(source[row], folder), (source.name, row))

    def state(self) -> dict[str, Any]:
        """Return the current position as a JSON-serialisable value, for `restore`."""
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`."""
        self.drawn = state["drawn"]


class Blocks:
    """Rows of a stream; `shuffle` shuffles each block of rows. At its end the stream restarts."""

    def __init__(self, source: Streamed, seed: int, shuffle: bool = True, block: int = BLOCK):
        """shuffle: False to draw the rows in the order of the stream."""
        self.source, self.seed, self.shuffle, self.block = source, seed, shuffle, block
        self.epoch, self.first, self.taken = 0, 0, 0
        """Epoch (counted from 0), stream index of the block's first row, and number of rows drawn from the block."""
        self.rows_in_block: list[dict | ValueError] = []
        self.order: list[int] = []
        self.rows: Iterator[dict | ValueError] | None = None

    def draw(self) -> Drawn:
        """Return the next row. Raises ValueError if the stream is empty or ends early."""
        if self.taken == len(self.rows_in_block):
            self.first, self.taken = self.first + len(self.rows_in_block), 0
            self._fill()
            if not self.rows_in_block:
                if not self.first:
                    raise ValueError(f"{self.source.name} holds no rows (--data.train)")
                self.epoch, self.first, self.rows = self.epoch + 1, 0, None
                self._fill()
        place = self.order[self.taken]
        self.taken += 1
        row = self.rows_in_block[place]
        return Drawn(f"{self.source.name}, row {self.first + place}", lambda: _read(row))

    def _fill(self) -> None:
        if self.rows is None:
            self.rows = self.source.rows(self.first)
        self.rows_in_block = list(islice(self.rows, self.block))
        self.order = list(range(len(self.rows_in_block)))
        if self.shuffle:
            generator_for(self.seed, _STREAM, self.epoch, self.first).shuffle(self.order)

    def state(self) -> dict[str, Any]:
        """Return the current position as a JSON-serialisable value, for `restore`."""
        return {"epoch": self.epoch, "first": self.first, "taken": self.taken, "block": self.block}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`; reload the block. Raises ValueError if the stream is too short."""
        self.epoch, self.first, self.block = state["epoch"], state["first"], state["block"]
        self.rows = None
        self._fill()
        self.taken = state["taken"]
        if self.taken > len(self.rows_in_block):
            last = self.first + self.taken - 1
            raise ValueError(f"{self.source.name} ends early: it had a row {last} before the resume, and lacks it now")


def _read(row: dict | ValueError) -> dict:
    if isinstance(row, ValueError):
        raise row
    return row


@dataclass
class Mixture:
    """All sources of a job, drawn in proportion to their weights."""

    parts: list[Permuted | Blocks]
    weights: list[float]
    """Relative weight of each part; the weights need not sum to 1."""
    counts: list[int] = field(default_factory=list)
    """Number of rows drawn from each part."""

    def __post_init__(self):
        self.counts = self.counts or [0] * len(self.parts)

    @property
    def drawn(self) -> int:
        """Number of rows drawn from all parts."""
        return sum(self.counts)

    @property
    def rows(self) -> int | None:
        """Number of draws until every part has been drawn completely once, or None if a part is a stream."""
        total, longest = sum(self.weights), 0
        for part, weight in zip(self.parts, self.weights, strict=True):
            if isinstance(part, Blocks):
                return None
            longest = max(longest, round(len(part) * total / weight))
        return longest

    def draw(self, count: int) -> list[Drawn]:
        """Return the next `count` rows."""
        return [self.parts[self._next()].draw() for _ in range(count)]

    def _next(self) -> int:
        total, due = sum(self.weights), self.drawn + 1
        behind = [due * w / total - n for w, n in zip(self.weights, self.counts, strict=True)]
        part = max(range(len(behind)), key=lambda i: (behind[i], -i))
        self.counts[part] += 1
        return part

    def state(self) -> dict[str, Any]:
        """Return the current position as a JSON-serialisable value, for `restore`."""
        return {"counts": list(self.counts), "parts": [part.state() for part in self.parts]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`."""
        self.counts = list(state["counts"])
        for part, place in zip(self.parts, state["parts"], strict=True):
            part.restore(place)
