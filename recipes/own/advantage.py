"""A custom advantage: `--algo.advantage recipes/own/advantage.py:median_baseline`.

An estimator gets `spmdrl.algos.samples.Samples`, the packed sequences of this rank. It returns advantages and returns,
both [T]. The samples of a group can be on different ranks, so statistics use `everyone`, which gathers the rows of all
ranks.
"""

import torch

from spmdrl.algos.samples import Result, Samples


def median_baseline(x: Samples) -> Result:
    """Reward minus the median of the group, which is robust against a single outlier."""
    score_N, group_N, mine = x.everyone(x.scores, x.group)
    baseline_N = torch.zeros_like(score_N)
    for group in group_N.unique():
        members_N = group_N == group
        baseline_N[members_N] = score_N[members_N].quantile(0.5)
    return x.outcome((score_N - baseline_N)[mine])
