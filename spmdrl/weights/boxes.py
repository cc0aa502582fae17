"""Boxes: rectangular slices of named tensors, each given by an index range per dimension.

A box is stored as a Python tuple, or as a row of integers in an array.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Box = tuple[tuple[int, int], ...]
"""A rectangular slice of a tensor: one pair (first index, last index + 1) per dimension."""


@dataclass
class Piece:
    """The slice of a named tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """The slice's index ranges in the whole tensor."""
    tensor: torch.Tensor
    """Values of the slice, with the shape of `box`."""
    exact: bool = False
    """True if the tensor must never be cast. Rounding a routing bias, for example, would change the chosen experts."""


@dataclass(frozen=True)
class Entry:
    """Name, shape and dtype of a whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """dtype of a tensor that is never cast, or None if the tensor may be cast."""

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return full_box(self.shape)


def full_box(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, n) for n in shape)


def size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(b - a for a, b in box)


def cut(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(a < b for a, b in both) else None


def inside(tensor: torch.Tensor, box: Box, origin: Box | None = None) -> torch.Tensor:
    """Return a view of the slice of `tensor` that `box` covers.

    box: index ranges in the whole tensor. origin: the box that `tensor` holds, or None if it is the whole tensor.
    """
    if box == origin:
        return tensor
    for dim, (a, b) in enumerate(box):
        start = a - (origin[dim][0] if origin else 0)
        tensor = tensor.narrow(dim, start, b - a)
    return tensor


def merged(boxes: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Merge boxes of the same tensor that overlap, or that touch along one dimension, into their bounding box.

    Merging is repeated, so no boxes of the result overlap. boxes: pairs (tensor index, box).
    """
    out: dict[int, list[Box]] = {}
    for i, box in boxes:
        apart = out.setdefault(i, [])
        while True:
            near = next((b for b in apart if _joins(b, box)), None)
            if near is None:
                break
            apart.remove(near)
            box = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(near, box, strict=True))
        apart.append(box)
    return [(i, box) for i, apart in out.items() for box in apart]


def _joins(one: Box, other: Box) -> bool:
    """Return True if two boxes overlap, or if they touch and differ in only one dimension."""
    apart = [d for d, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
    overlap = cut(one, other) is not None
    touch = len(apart) <= 1 and all(one[d][0] <= other[d][1] and other[d][0] <= one[d][1] for d in apart)
    return overlap or touch


# ── boxes as rows, int64 [n, 1 + 2 D]: tensor index, D first indices, D last indices + 1 ──


def most_dims(entries: Sequence[Entry]) -> int:
    """Return D, the maximum number of tensor dimensions, at least 1."""
    return max([1, *(len(entry.shape) for entry in entries)])


def to_rows(boxes: Sequence[tuple[int, Box]], dims: int) -> np.ndarray:
    """Convert pairs (tensor index, box) to rows. Missing dimensions become the range (0, 1)."""
    rows = np.zeros((len(boxes), 1 + 2 * dims), dtype=np.int64)
    rows[:, 1 + dims :] = 1
    for row, (i, box) in zip(rows, boxes, strict=True):
        row[0] = i
        for d, (a, b) in enumerate(box):
            row[1 + d], row[1 + dims + d] = a, b
    return rows


def to_boxes(rows: np.ndarray, entries: Sequence[Entry]) -> list[tuple[int, Box]]:
    """Convert rows to pairs (tensor index, box)."""
    dims = rows.shape[1] // 2
    # zip stops at the shortest argument, the shape, so it drops the dimensions that the tensor does not have.
    return [
        (row[0], tuple((a, b) for a, b, _ in zip(row[1 : 1 + dims], row[1 + dims :], entries[row[0]].shape)))  # noqa: B905
        for row in rows.tolist()
    ]


def sizes(rows: np.ndarray) -> np.ndarray:
    """Return the number of elements in each row's box: int64 [n]."""
    dims = rows.shape[1] // 2
    return (rows[:, 1 + dims :] - rows[:, 1 : 1 + dims]).prod(1)


def runs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that sorts rows by tensor and box, and the positions in this order where the row changes."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(1)
    return order, np.flatnonzero(begins)


MEETING = 1 << 16
"""Maximum number of row pairs compared at once, to bound memory use."""


def meet(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find all pairs of overlapping boxes of the same tensor.

    one, other: boxes as rows, where `other` must be sorted by tensor. Returns three arrays with one entry per pair,
    ordered by `one` and then by `other`: the index into `one`, the index into `other`, and the overlap as a row.
    """
    dims = one.shape[1] // 2
    first, last = (np.searchsorted(other[:, 0], one[:, 0], side) for side in ("left", "right"))
    ends = np.cumsum(last - first)
    found = []
    for begin in range(0, int(ends[-1]) if len(ends) else 0, MEETING):
        pair = np.arange(begin, min(begin + MEETING, ends[-1]))
        a = np.searchsorted(ends, pair, "right")
        b = pair - ends[a] + last[a]
        region = one[a]
        np.maximum(region[:, 1 : 1 + dims], other[b, 1 : 1 + dims], out=region[:, 1 : 1 + dims])
        np.minimum(region[:, 1 + dims :], other[b, 1 + dims :], out=region[:, 1 + dims :])
        common = (region[:, 1 : 1 + dims] < region[:, 1 + dims :]).all(1)
        found.append((a[common], b[common], region[common]))
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), one[:0]
    a, b, regions = (np.concatenate(part) for part in zip(*found, strict=True))
    return a, b, regions


def clashing(groups: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the sorted indices of the groups in which two boxes overlap.

    groups: int64 [n], group index of each row, ascending. All rows of a group belong to the same tensor.
    """
    if not len(rows):
        return groups
    dims, count = rows.shape[1] // 2, groups[-1] + 1
    # In most groups, the boxes follow one another along some dimension and therefore cannot overlap. Only the other
    # groups are compared pair by pair, because the number of pairs grows with n^2.
    meets = (groups[1:] == groups[:-1])[:, None] & (rows[1:, 1 : 1 + dims] < rows[:-1, 1 + dims :])
    unsure = np.logical_and.reduce([np.bincount(groups[1:][d], minlength=count) > 0 for d in meets.T])
    chosen = unsure[groups]
    grouped = np.column_stack([groups[chosen], rows[chosen, 1:]])
    one, other, _ = meet(grouped, grouped)
    return np.unique(grouped[one[one != other], 0])
