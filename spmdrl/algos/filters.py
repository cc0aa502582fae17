"""Selects the groups that a step trains on (dynamic sampling).

B: sequences. A group consists of all samples for one prompt; the batch contains all of them. A filter is `f(score_B,
group_B, **settings) -> bool [B]`, True for sequences to keep. A filter keeps or drops whole groups. score_B: any real
dtype; group_B: int64, any numbering. The result depends neither on the sample order nor on the other groups, so it does
not depend on the number of ranks. Filters raise ValueError for shapes other than [B] or scores that are not finite.
"""

import math
from collections.abc import Callable, Sequence

import torch

from spmdrl.algos.groups import grouped


def mixed(score_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Dynamic sampling: keeps groups whose scores are not all equal, because equal scores give advantages of 0.

    Source: DAPO, https://arxiv.org/abs/2503.14476

    A group of one is never kept.
    """
    score_B, groups = grouped(score_B, group_B)
    return groups.high(score_B) > groups.low(score_B)


def accuracy_range(
    score_B: torch.Tensor, group_B: torch.Tensor, *, low: float = 0.2, high: float = 0.8
) -> torch.Tensor:
    """Online prompt filtering: keeps groups whose mean score is in [low, high], inclusive.

    Source: PRIME, https://arxiv.org/abs/2502.01456

    The default bounds assume scores of 0 and 1, whose mean is the accuracy. Raises ValueError if low is above high.
    """
    if not low <= high:
        raise ValueError(f"accuracy_range needs low <= high, got {low} and {high}")
    score_B, groups = grouped(score_B, group_B)
    # `groups.sum` adds scores in ascending order, so its rounding does not depend on the sample order. If rounding
    # depended on the order, the order could decide whether a group whose mean equals a bound is kept.
    mean_B = groups.sum(score_B) / groups.size_N
    return (low <= mean_B) & (mean_B <= high)


FILTERS: dict[str, Callable[..., torch.Tensor]] = {
    "mixed": mixed,
    "accuracy_range": accuracy_range,
}


def whole_groups(keep_B: torch.Tensor, group_B: torch.Tensor, name: str = "the filter") -> torch.Tensor:
    """Check that `keep_B` is bool [B] and constant within each group, and return it.

    name: filter name, for the error message. Raises ValueError if the check fails.
    """
    if not isinstance(keep_B, torch.Tensor) or keep_B.dtype != torch.bool or keep_B.shape != group_B.shape:
        got = f"{keep_B.dtype} {list(keep_B.shape)}" if isinstance(keep_B, torch.Tensor) else type(keep_B).__name__
        raise ValueError(f"{name} must return a bool tensor [{len(group_B)}], one per sequence; it returned {got}")
    kept_B, groups = grouped(keep_B, group_B)
    some_B = groups.low(kept_B) != groups.high(kept_B)
    if bool(some_B.any()):
        split = torch.unique(group_B[some_B])[:8].tolist()
        raise ValueError(
            f"{name} kept only a part of groups {split}: it must keep or drop all samples of a prompt together, "
            "because advantages compare them with each other"
        )
    return keep_B


def choose(kept_positions: torch.Tensor | Sequence[torch.Tensor], wanted: int) -> torch.Tensor:
    """Return the `wanted` lowest kept positions, or all if there are fewer: int64, ascending.

    kept_positions: int64 prompt positions in any order, as one tensor, or as one tensor per rank or round. A position
    may occur several times (once per sample of the prompt) and counts once.
    """
    parts = [kept_positions] if isinstance(kept_positions, torch.Tensor) else list(kept_positions)
    assert wanted >= 0 and all(part.dtype == torch.int64 for part in parts), (wanted, [p.dtype for p in parts])
    return torch.unique(torch.cat(parts))[:wanted] if parts else torch.zeros(0, dtype=torch.int64)


def shortage(name: str, kept: int, sampled: int, wanted: int, rounds: int) -> str:
    """Return the error message for a step with too few prompts left after the filter `name`, including the flags to
    change.

    kept, sampled: number of prompts kept and sampled, over all ranks and rounds. wanted: number of prompts that the
    step needs. rounds: number of sampling rounds.
    """
    rate = kept / sampled if sampled else 0.0
    shortfall = (
        f"the filter {name} kept {kept} of {sampled} prompts (acceptance rate {rate:.1%}) in {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}, and a step needs {wanted}: "
    )
    if not kept:
        return shortfall + (
            "look at the rewards in samples.jsonl, because every prompt may be too hard or too easy, and choose a "
            "milder --filter.keep; a higher --filter.max-rounds or a lower --rollout.prompts-per-step helps only where "
            "some prompts pass"
        )
    return shortfall + (
        f"raise --filter.max-rounds (to about {math.ceil(wanted * rounds / kept)} at this rate), choose a milder "
        f"--filter.keep, or lower --rollout.prompts-per-step (to {kept} or less)"
    )
