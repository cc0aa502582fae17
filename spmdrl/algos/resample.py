"""Policy filtration: resampling that favours samples whose reward is likely right. The module also has a replay buffer.

Source: PF-PPO, https://arxiv.org/abs/2409.06957. N: sequences of all ranks in sample order, so that every rank draws
the same sequences. A method is `f(score_N, groups, power)` and returns the relative frequency of each sequence, fp64
[N], >= 0. Equal scores within a group get equal weights, so the weights do not depend on the sample order.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

from spmdrl.algos.groups import Groups, grouped
from spmdrl.algos.rows import find


def by_power(score_N: torch.Tensor, groups: Groups, power: float) -> torch.Tensor:
    """|reward|^2, or |reward|^p with `--filter.resample pow=p`. If every reward is 0, all samples get 1."""
    if power < 0:
        raise ValueError(f"the power of the resampling weights must be >= 0, got {power}")
    weights_N = score_N.abs().pow(power)
    if not bool(torch.isfinite(weights_N).all()):
        raise ValueError(f"|score|^{power} is beyond fp64 for a score of {float(score_N.abs().max())}: lower the power")
    return weights_N if bool((weights_N > 0).any()) else torch.ones_like(weights_N)


def max_min(score_N: torch.Tensor, groups: Groups, power: float) -> torch.Tensor:
    """1 for the highest and the lowest reward of the step, 0 for all others."""
    return ((score_N == score_N.max()) | (score_N == score_N.min())).double()


def max_random(score_N: torch.Tensor, groups: Groups, power: float) -> torch.Tensor:
    """0.4 for the highest reward of the step, 0.1 for all others."""
    return torch.where(score_N == score_N.max(), torch.tensor(0.4, dtype=torch.float64), 0.1)


def best_random(score_N: torch.Tensor, groups: Groups, power: float) -> torch.Tensor:
    """Within each group, the best sample gets 1/2, and the other samples share 1/2 equally. A single sample gets 1."""
    best_N = groups.high(score_N)
    is_best_N = score_N == best_N
    size_N, tied_N = groups.size_N, groups.sum(is_best_N.double())
    other_N = 0.5 / (size_N - 1).clamp(min=1)
    # If k samples tie for the best, they share a weight of 1/2 plus k - 1 times the weight of a non-best sample.
    best_weight_N = torch.where(is_best_N, (0.5 + (tied_N - 1) * other_N) / tied_N, other_N)
    return torch.where(best_N == groups.low(score_N), 1 / size_N, best_weight_N)


def best_worst(score_N: torch.Tensor, groups: Groups, power: float) -> torch.Tensor:
    """Within each group, the best and the worst sample get 1/2 each. A single sample gets 1."""
    ends = [score_N == end_N for end_N in (groups.high(score_N), groups.low(score_N))]
    best_N, worst_N = (0.5 * is_end_N / groups.sum(is_end_N.double()) for is_end_N in ends)
    return best_N + worst_N


METHODS: dict[str, Callable[[torch.Tensor, Groups, float], torch.Tensor]] = {
    "pow": by_power,
    "max_min": max_min,
    "max_random": max_random,
    "best_random": best_random,
    "best_worst": best_worst,
}


def weights(score_N: torch.Tensor, method: str, group_N: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    """Return the weight of each sequence, fp64 [N], >= 0.

    score_N: any real dtype. method: a key of METHODS. group_N: int64, prompt id of each sequence. Raises ValueError for
    an unknown method, a negative power, a score that is not finite, or |score|^power beyond fp64.
    """
    function = find(method, METHODS, "resampling method")
    score_N, groups = grouped(score_N, group_N)
    return function(score_N, groups, power) if len(score_N) else score_N


def draw(weights_N: torch.Tensor, uniform_n: torch.Tensor) -> torch.Tensor:
    """Draw rows with replacement, in proportion to their weights: int64 [n]. A row with weight 0 is never drawn.

    weights_N: [N], finite and >= 0. uniform_n: one random number in [0, 1) per draw, identical on every rank so that
    every rank draws the same rows, for example `seeds.uniform` with a seed for (seed, step) at positions 0 .. n - 1.
    Raises ValueError if a weight is negative or not finite, or if no weight is positive.
    """
    if not len(uniform_n):
        return torch.zeros(0, dtype=torch.int64)
    weights_N = weights_N.double()
    if not bool((torch.isfinite(weights_N) & (weights_N >= 0)).all()):
        raise ValueError("resampling weights must be finite and >= 0")
    if not bool((weights_N > 0).any()):
        raise ValueError(f"cannot draw {len(uniform_n)} of {len(weights_N)} sequences: no weight is positive")
    assert bool(((uniform_n >= 0) & (uniform_n < 1)).all()), "uniform numbers must be in [0, 1)"
    # Weights are divided by the largest one, so that sums of very large or small weights stay within the range of fp64.
    edges_N = torch.cumsum(weights_N / weights_N.max(), 0)
    # A number below 1, multiplied by the last edge, is below that edge even after rounding, so every draw selects a
    # row.
    return torch.searchsorted(edges_N, uniform_n.double() * edges_N[-1], right=True)


Item = TypeVar("Item")


class Buffer(Generic[Item]):
    """Replay buffer that holds the items of the last `steps` steps. The most recently added step has age 0.

    A rank that has no items in a step must append an empty list, so that ages agree across ranks. Raises ValueError if
    `steps` is below 1.
    """

    def __init__(self, steps: int):
        if steps < 1:
            raise ValueError(f"a replay buffer must hold at least 1 step, got {steps}")
        self.steps = steps
        self._held: deque[tuple[int, list[Item]]] = deque()

    def append(self, step: int, items: Iterable[Item]) -> None:
        """Add items to the latest or to a new step, and drop steps whose age reaches `steps`."""
        assert not self._held or step >= self._held[-1][0], f"step {step} was added after step {self._held[-1][0]}"
        if not self._held or step > self._held[-1][0]:
            self._held.append((step, []))
        self._held[-1][1].extend(items)
        while self._held[0][0] <= step - self.steps:
            self._held.popleft()

    def entries(self) -> list[tuple[int, Item]]:
        """Return all items as (step, item), in the order in which they were added."""
        return [(step, item) for step, items in self._held for item in items]

    def aged(self, age: int) -> list[Item]:
        """Return the items of the step with this age, or an empty list if there are none."""
        return [item for step, items in self._held for item in items if step == self._held[-1][0] - age]
