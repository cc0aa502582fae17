"""Outcome advantages: one number per sequence from one reward per sequence.

B: all sequences of the step, over all ranks; a group is the samples of one prompt. Every function takes `reward_B`
(any real dtype) and `group_B` (int64, the prompt of each sequence, any numbering), computes in fp64 and returns fp64
[B]. The result is bit for bit independent of the order of the samples on CPU: sums run in order of reward, not of
arrival. A token's advantage is its sequence's: `advantage_B[seq_T]`. ValueError: shapes that are not [B], a reward that
is not finite.
"""

from collections.abc import Callable

import torch


def grpo(reward_B: torch.Tensor, group_B: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """GRPO: (reward - group mean) / (group std + eps), unbiased std.

    Source: https://arxiv.org/abs/2402.03300

    A group of one has no spread: its mean is taken as 0 and its std as 1. A group of equal rewards gives exactly 0.
    """
    reward_B, index_B, order_B = _prepare(reward_B, group_B)
    size_B, centred_B = _centre(reward_B, index_B, order_B)
    std_B = (_group_sum(centred_B.square(), index_B, order_B) / (size_B - 1).clamp(min=1)).sqrt()
    return torch.where(size_B > 1, centred_B / (std_B + eps), reward_B / (1 + eps))


def dr_grpo(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Dr. GRPO: reward - group mean, without the division by std.

    Source: https://arxiv.org/abs/2503.20783

    A group of one keeps its raw reward.
    """
    reward_B, index_B, order_B = _prepare(reward_B, group_B)
    size_B, centred_B = _centre(reward_B, index_B, order_B)
    return torch.where(size_B > 1, centred_B, reward_B)


def rloo(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """RLOO: reward - mean reward of the other samples of the group.

    Source: https://arxiv.org/abs/2402.14740

    A group of one has no others and keeps its raw reward.
    """
    reward_B, index_B, order_B = _prepare(reward_B, group_B)
    size_B, centred_B = _centre(reward_B, index_B, order_B)
    # reward - (sum - reward) / (n - 1) = (reward - mean) * n / (n - 1)
    return torch.where(size_B > 1, centred_B * size_B / (size_B - 1).clamp(min=1), reward_B)


def reinforce(reward_B: torch.Tensor, group_B: torch.Tensor, *, baseline: str = "batch") -> torch.Tensor:
    """Plain REINFORCE: reward - baseline, groups ignored.

    Source: https://doi.org/10.1007/BF00992696

    baseline: `batch`, the mean reward of all B sequences, or `none`, 0. No division by a std and no whitening: this is
    not REINFORCE++.
    """
    reward_B, _, order_B = _prepare(reward_B, group_B)
    if baseline == "none":
        return reward_B
    if baseline != "batch":
        raise ValueError(f"unknown baseline {baseline!r}: choose batch or none")
    _, centred_B = _centre(reward_B, torch.zeros_like(order_B), torch.argsort(reward_B, stable=True))
    return centred_B


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}


def _prepare(reward_B: torch.Tensor, group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reward in fp64, group renumbered 0..G-1, and the order (group, reward) in which sums run."""
    if reward_B.ndim != 1 or reward_B.shape != group_B.shape:
        raise ValueError(f"reward and group must both be [B], got {tuple(reward_B.shape)} and {tuple(group_B.shape)}")
    reward_B = reward_B.detach().to(torch.float64)
    if not bool(torch.isfinite(reward_B).all()):
        bad = torch.nonzero(~torch.isfinite(reward_B)).flatten()[:8].tolist()
        raise ValueError(f"rewards of sequences {bad} are not finite: check the reward function")
    index_B = torch.unique(group_B, return_inverse=True)[1]
    order_B = torch.argsort(reward_B, stable=True)
    order_B = order_B[torch.argsort(index_B[order_B], stable=True)]
    return reward_B, index_B, order_B


def _group_sum(value_B: torch.Tensor, index_B: torch.Tensor, order_B: torch.Tensor) -> torch.Tensor:
    """[B]: for each sample, the sum of value over its group."""
    sums = torch.zeros_like(value_B)  # one slot per group, and there are at most B groups
    return sums.index_add_(0, index_B[order_B], value_B[order_B])[index_B]


def _centre(reward_B: torch.Tensor, index_B: torch.Tensor, order_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Group size and reward - group mean, both [B]."""
    size_B = _group_sum(torch.ones_like(reward_B), index_B, order_B)
    # Measured from the group's lowest reward, so that equal rewards centre to exactly 0 and grpo does not divide
    # rounding by eps.
    lowest = torch.zeros_like(reward_B).scatter_reduce_(0, index_B, reward_B, "amin", include_self=False)
    above_B = reward_B - lowest[index_B]
    return size_B, above_B - _group_sum(above_B, index_B, order_B) / size_B
