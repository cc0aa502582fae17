"""Groups of rows, and group sums that do not depend on the order of the rows.

N: rows of any kind; B: the sequences of a batch. A group usually consists of the samples for one prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.algos.rows import in_range


@dataclass(frozen=True)
class Groups:
    """Groups of rows, with a fixed summation order, so that sums do not depend on the order of the rows."""

    index_N: torch.Tensor
    """int64: group index of each row. Groups are numbered from 0 in ascending key order."""
    order_N: torch.Tensor
    """int64: indices of the rows, sorted by group and then by value."""
    size_N: torch.Tensor
    """fp64: size of each row's group."""

    @staticmethod
    def of(keys: Sequence[torch.Tensor], *values_N: torch.Tensor) -> "Groups":
        """Group rows with equal keys.

        keys: tensors [N]. values_N: tensors [N]. Sums add the rows of a group in ascending order of these values.
        """
        index_N = torch.zeros(len(keys[0]), dtype=torch.int64)
        for key_N in keys:
            _, number_N = torch.unique(key_N, return_inverse=True)
            _, index_N = torch.unique(index_N * (len(key_N) + 1) + number_N, return_inverse=True)
        order_N = torch.arange(len(index_N))
        for column_N in (*reversed(values_N), index_N):
            order_N = order_N[torch.argsort(column_N[order_N], stable=True)]
        return Groups(index_N, order_N, torch.bincount(index_N).double()[index_N])

    def sum(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over each row's group, [N]."""
        sums = torch.zeros_like(x_N)  # N entries are enough, because there are at most N groups
        return sums.index_add_(0, self.index_N[self.order_N], x_N[self.order_N])[self.index_N]

    def low(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return the minimum of x in each row's group, [N]."""
        lowest = torch.zeros_like(x_N).scatter_reduce_(0, self.index_N, x_N, "amin", include_self=False)
        return lowest[self.index_N]

    def high(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return the maximum of x in each row's group, [N]."""
        highest = torch.zeros_like(x_N).scatter_reduce_(0, self.index_N, x_N, "amax", include_self=False)
        return highest[self.index_N]


def centre(x_N: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return x minus the group mean, or 0 in a group of one."""
    # The lowest value of the group is subtracted first. Equal values are then centred to exactly 0, so `normalise` does
    # not divide rounding errors by eps.
    above_N = x_N - groups.low(x_N)
    return above_N - groups.sum(above_N) / groups.size_N


def spread(centred_N: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return each row's unbiased group std, computed from centred values, or 0 in a group of one."""
    scale_N = power_of_two(groups.low(-centred_N.abs()))
    squares_N = groups.sum((centred_N / scale_N).square())
    return (squares_N / (groups.size_N - 1).clamp(min=1)).sqrt() * scale_N


def normalise(x_N: torch.Tensor, groups: Groups, eps: float) -> torch.Tensor:
    """Return (x - group mean) / (group std + eps), or x / (1 + eps) in a group of one.

    Raises ValueError if eps is negative.
    """
    in_range("eps", eps, 0)
    centred_N = centre(x_N, groups)
    scaled_N = torch.where(centred_N == 0, 0.0, centred_N / (spread(centred_N, groups) + eps))
    return torch.where(groups.size_N > 1, scaled_N, x_N / (1 + eps))


def subtract_mean(x_N: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return x minus the group mean, or x itself in a group of one."""
    return torch.where(groups.size_N > 1, centre(x_N, groups), x_N)


def leave_one_out(x_N: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return x minus the mean of the other rows of the group, or x itself in a group of one."""
    # x - (sum - x) / (n - 1) = (x - mean) * n / (n - 1), and the right side is computed here.
    scaled_N = centre(x_N, groups) * groups.size_N / (groups.size_N - 1).clamp(min=1)
    return torch.where(groups.size_N > 1, scaled_N, x_N)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two above each |x|, or 1 where x is 0.

    Dividing by this power is exact, and the squares of the quotients cannot overflow.
    """
    mantissa, _ = torch.frexp(x.abs())
    return torch.where(x == 0, 1.0, x.abs() / torch.where(x == 0, 1.0, mantissa))


def finite_column(score_B: torch.Tensor, what: str = "rewards") -> torch.Tensor:
    """Return a column [B] in fp64, detached. what: column name, for error messages.

    Raises ValueError if the shape is not [B] or a value is not finite.
    """
    if score_B.ndim != 1:
        raise ValueError(f"{what} must be [B], one per sequence, got {list(score_B.shape)}")
    score_B = score_B.detach().double()
    bad_B = ~torch.isfinite(score_B)
    if bool(bad_B.any()):
        bad = torch.nonzero(bad_B).flatten()[:8]
        values = ", ".join(f"sequence {i}: {v}" for i, v in zip(bad.tolist(), score_B[bad].tolist(), strict=True))
        raise ValueError(f"{what} are not finite ({values}): check the function that computed them")
    return score_B


def grouped(score_B: torch.Tensor, group_B: torch.Tensor, what: str = "rewards") -> tuple[torch.Tensor, Groups]:
    """Return the scores [B] as `finite_column` does, and their groups. group_B: int64, any numbering."""
    score_B = finite_column(score_B, what)
    if score_B.shape != group_B.shape:
        raise ValueError(f"{what} and group must both be [B], got {list(score_B.shape)} and {list(group_B.shape)}")
    return score_B, Groups.of([group_B], score_B)
