"""A custom filter: `--filter.keep recipes/own/filter.py:within_reach`.

A filter gets the score (or the reward part of --filter.metric) and the group of each sequence, both [B]. It returns
bool [B], True for sequences to keep, the same for all samples of a group. It gets all samples of a group, so it does
not need data of other ranks. The step samples other prompts to replace those that are dropped.
"""

import torch


def within_reach(score_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Keep prompts with right and wrong samples."""
    keep_B = torch.zeros(len(score_B), dtype=torch.bool)
    for group in group_B.unique():
        members_B = group_B == group
        right_B = score_B[members_B] >= 1
        keep_B[members_B] = right_B.any() & ~right_B.all()
    return keep_B
