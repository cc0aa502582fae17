"""Outcome advantages: one number per sequence, assigned to all of its sampled tokens.

N: number of sequences across all ranks. A group consists of the samples for one prompt. Estimators take `Samples`,
whose docstring describes shapes and errors. The returns of these estimators equal the advantages. On a CPU, results are
bitwise identical for any sample order and any distribution over ranks, because terms are always added in order of group
and value.
"""

from collections.abc import Mapping, Sequence

import torch

from spmdrl.algos.groups import Groups, centre, leave_one_out, normalise, spread, subtract_mean
from spmdrl.algos.rows import in_range
from spmdrl.algos.samples import Result, Samples, finite

SCORE = "score"
"""Name of the total reward in the `weights` argument of `gdpo`."""


def grpo(x: Samples, *, eps: float = 1e-6) -> Result:
    """GRPO: the reward minus the group mean, divided by the group standard deviation.

    Source: https://arxiv.org/abs/2402.03300

        A = (r - mean of the group) / (std of the group + eps)

    In a group of one, the mean is taken as 0 and the std as 1, so A is `r / (1 + eps)`. If all rewards of a larger
    group are equal, A is exactly 0.
    """
    score_N, groups, mine = _scores(x)
    return x.outcome(normalise(score_N, groups, eps)[mine])


def dr_grpo(x: Samples) -> Result:
    """Dr. GRPO: the reward minus the group mean, without GRPO's division by the std, which upweights very easy and very
    hard prompts.

    Source: https://arxiv.org/abs/2503.20783

        A = r - mean of the group

    In a group of one, A is `r`. If all rewards of a larger group are equal, A is 0.
    """
    score_N, groups, mine = _scores(x)
    return x.outcome(subtract_mean(score_N, groups)[mine])


def rloo(x: Samples) -> Result:
    """RLOO: the reward minus the mean reward of the other samples in the group.

    Source: https://arxiv.org/abs/2402.14740

        A = r - mean of the other samples of the group

    In a group of one, A is `r`. If all rewards of a larger group are equal, A is 0.
    """
    score_N, groups, mine = _scores(x)
    return x.outcome(leave_one_out(score_N, groups)[mine])


def reinforce(x: Samples, *, baseline: str = "batch") -> Result:
    """REINFORCE: the reward minus a baseline shared by all samples of the step.

    Source: https://doi.org/10.1007/BF00992696

        A = r - baseline

    `baseline`: `batch` uses the mean reward of the step, `none` uses 0. Unlike REINFORCE++, this estimator does not
    whiten the advantages.

    The estimator ignores groups. If all rewards of the step are equal and the baseline is `batch`, A is 0.
    """
    if baseline == "none":
        return x.outcome(x.scores)
    if baseline != "batch":
        raise ValueError(f"unknown baseline {baseline!r}: choose batch or none")
    score_N, mine = x.everyone(x.scores)
    return x.outcome(centre(score_N, Groups.of([torch.zeros_like(score_N)], score_N))[mine])


def reinforce_plus_plus_baseline(x: Samples) -> Result:
    """REINFORCE++-baseline: the reward minus the group mean, whitened over the step.

    Source: https://arxiv.org/abs/2501.03262

        A = (r - mean of the group), whitened

    Before whitening, the value is `r` in a group of one, and 0 in a larger group whose rewards are all equal. Whitening
    then subtracts the mean of these values over the step. If every group has at least two samples and all of its
    rewards are equal, A is exactly 0.
    """
    advantages_T = x.whiten(dr_grpo(x)[0])
    return advantages_T, advantages_T


def opo(x: Samples) -> Result:
    """OPO: the reward minus the group's mean reward, where each sample is weighted by its number of sampled tokens.

    Source: https://arxiv.org/abs/2505.23585

        A = r - (sum over the group of length * r) / (sum over the group of length)

    In a group of one, A is `r`. If all rewards of a larger group are equal, A is 0.
    """
    score_N, length_N, group_N, mine = x.everyone(x.scores, x.lengths, x.group)
    groups = Groups.of([group_N], score_N, length_N)
    above_N = score_N - groups.low(score_N)
    mean_N = groups.sum(length_N * above_N) / groups.sum(length_N).clamp(min=1)
    return x.outcome(torch.where(groups.size_N > 1, above_N - mean_N, score_N)[mine])


def gpg(x: Samples, *, f_norm: float = 1.0, count: str = "rewarded") -> Result:
    """GPG: the reward minus the group mean, scaled up to compensate for samples without a gradient.

    Source: https://arxiv.org/abs/2504.02546

        A = alpha * (r - mean of the group) / f_norm          alpha = samples of the step / counted samples

    `count`: `rewarded` counts samples with a nonzero reward, as common implementations do. `mixed` counts samples from
    groups whose rewards are not all equal, as the paper does, so alpha compensates for groups without a gradient. If
    the count is 0, alpha is the number of samples in the step.

    In a group of one, A is `alpha * r / f_norm`. If all rewards of a larger group are equal, A is 0.
    """
    if f_norm == 0:
        raise ValueError("f_norm divides the advantages: it cannot be 0")
    if count not in ("rewarded", "mixed"):
        raise ValueError(f"unknown count {count!r}: choose rewarded or mixed")
    score_N, groups, mine = _scores(x)
    counted_N = score_N != 0 if count == "rewarded" else -groups.low(-score_N) > groups.low(score_N)
    alpha = len(score_N) / counted_N.double().sum().clamp(min=1)
    return x.outcome(alpha * subtract_mean(score_N, groups)[mine] / f_norm)


def grpo_pass_k(x: Samples, *, eps: float = 1e-6, std: bool = True) -> Result:
    """GRPO for pass@k, where k is the group size: only the best sample of a group has a nonzero advantage.

    Source: https://arxiv.org/abs/2503.19595

        A of the best sample of a group = (best - second best) / (std of the group + eps), all others 0

    With `std` False, A is not divided by the std. If two or more samples tie for the best reward, A is 0 for the
    whole group.

    A is 0 in a group of one, or if all rewards of the group are equal.
    """
    in_range("eps", eps, 0)
    score_N, groups, mine = _scores(x)
    best_N = -groups.low(-score_N)
    is_best_N = score_N == best_N
    gap_N = groups.low(torch.where(is_best_N, torch.inf, best_N - score_N))
    if std:
        gap_N = gap_N / (spread(centre(score_N, groups), groups) + eps)
    wins_N = is_best_N & (groups.sum(is_best_N.double()) == 1) & (groups.size_N > 1)
    return x.outcome(torch.where(wins_N, gap_N, 0.0)[mine])


def gdpo(x: Samples, *, weights: Mapping[str, float] | Sequence[float] | None = None, eps: float = 1e-6) -> Result:
    """GDPO: each reward part is normalised separately, so that a large part does not drown out the other parts.

    Source: https://arxiv.org/abs/2601.05242

        A = sum over the score and its parts of weight * (part - mean of the group) / (std of the group + eps), whitened

    The part `score` is the total reward that other estimators use, including the reward model's score, shaping and KL.
    `weights` is either a mapping from part names to weights, where missing parts get weight 0, or a list with one
    weight per part, in order, where the score gets weight 0. If `weights` is None, the score and all parts have weight
    1, so every part counts twice if the score is the sum of its parts. To count each part once, give weights to the
    parts only, as in `--algo.part-weights right=1 format=0.5`.

    No part may be named `score`. A part with a nonzero weight must be present and finite in every sample. A sample
    whose grading timed out has 0 for each missing part.

    In a group of one, a part becomes `part / (1 + eps)` before whitening. A part that is equal in all samples of a
    larger group contributes 0.
    """
    if SCORE in x.parts:
        raise ValueError(
            f"a part of the reward is named {SCORE!r}, which is the name of the total reward: rename the part"
        )
    sampled_B, weight = x.lengths > 0, _weights(weights, list(x.parts))
    parts = {name: torch.where(sampled_B, part, 0.0) for name, part in x.parts.items() if weight.get(name)}
    for name, part_B in parts.items():
        parts[name] = finite(x, f"parts[{name!r}]", part_B, per_token=False)
    if weight.get(SCORE):
        parts = {SCORE: x.scores, **parts}
    *columns_N, group_N, mine = x.everyone(*parts.values(), x.group)
    total_N = torch.zeros_like(group_N)
    for name, part_N in zip(parts, columns_N, strict=True):
        total_N = total_N + weight[name] * normalise(part_N, Groups.of([group_N], part_N), eps)
    advantages_T = x.whiten(x.at_tokens(total_N[mine]))
    return advantages_T, advantages_T


def win_rate(x: Samples) -> Result:
    """Win rate: SPPO's estimate of the probability that a response beats another response from the policy, minus 1/2.

    Source: https://arxiv.org/abs/2405.00675

        A = (lower + equal / 2) / (size of the group - 1) - 1/2            in [-1/2, 1/2]

    `lower` counts the other samples of the group that have a lower reward, and `equal` those with the same reward. The
    score of a pairwise judge (docs/judge.md#pairs) is already a win rate: use `dr_grpo` with it.

    A is 0 in a group of one, or if all rewards of the group are equal.
    """
    score_N, groups, mine = _scores(x)
    # If samples are sorted by (group, reward), the samples with a lower reward lie between the start of the group and
    # the first sample with the same reward.
    ranks = Groups.of([groups.index_N, score_N])
    starts = [torch.cumsum(torch.bincount(g.index_N), 0) - torch.bincount(g.index_N) for g in (ranks, groups)]
    below_N = starts[0][ranks.index_N] - starts[1][groups.index_N]
    rate_N = (below_N + (ranks.size_N - 1) / 2) / (groups.size_N - 1).clamp(min=1)
    return x.outcome(torch.where(groups.size_N > 1, rate_N - 0.5, 0.0)[mine])


def _scores(x: Samples) -> tuple[torch.Tensor, Groups, torch.Tensor]:
    """Return the total reward of every sequence [N], the groups, and the indices [B] of this rank's sequences."""
    score_N, group_N, mine = x.everyone(x.scores, x.group)
    return score_N, Groups.of([group_N], score_N), mine


def _weights(weights: Mapping[str, float] | Sequence[float] | None, names: list[str]) -> dict[str, float]:
    """Return the weights as a dict of part name -> weight. names: part names, in order."""
    everything = [SCORE, *names]
    if weights is None:
        weights = dict.fromkeys(everything, 1.0)
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(
                f"a list of weights must have one number for each part of the reward, {names}, and has {len(weights)}; "
                f"to weigh the score, too, give the weights by name, where {SCORE!r} is the score"
            )
        weights = dict(zip(names, weights, strict=True))
    if unknown := sorted(set(weights) - set(everything)):
        raise ValueError(f"weights name {unknown}, but the parts of the reward are {everything}")
    return {name: in_range(f"weight of {name}", float(w), -1e6, 1e6) for name, w in weights.items()}
