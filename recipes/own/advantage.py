"""An advantage of your own: `--algo.advantage recipes/own/advantage.py:median_baseline`.

An estimator sees `spmdrl.algos.samples.Samples`: the sequences of this rank, packed. It returns advantages and
returns, both [T]. A group may be spread over ranks, so statistics go through `everyone`, which gives the rows of all.
"""

import torch

from spmdrl.algos.samples import Result, Samples


def median_baseline(x: Samples) -> Result:
    """Reward minus the median of the group, which one lucky sample cannot move."""
    score_N, group_N, mine = x.everyone(x.scores, x.group)
    baseline_N = torch.zeros_like(score_N)
    for group in group_N.unique():
        members_N = group_N == group
        baseline_N[members_N] = score_N[members_N].quantile(0.5)
    return x.outcome((score_N - baseline_N)[mine])
