"""Chooses the groups that a step learns from: dynamic sampling.

B: sequences, whole groups of them; a group is the samples of one prompt. A filter is
`f(score_B, group_B, **settings) -> bool [B]`, True where the sequence is kept, alike for all samples of a group.
score_B: any real dtype; group_B: int64, any numbering. The result depends neither on the order of the samples nor on
the other groups, so ranks that hold different groups decide as one rank would. ValueError: shapes that are not
[B], a score that is not finite.
"""

import math
from collections.abc import Callable, Sequence

import torch

from spmdrl.algos.groups import grouped


def mixed(score_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Dynamic sampling: groups whose scores differ, since equal ones have no advantage to learn from. bool [B].

    Source: DAPO, https://arxiv.org/abs/2503.14476

    A group of one is never mixed.
    """
    score_B, groups = grouped(score_B, group_B)
    return groups.high(score_B) > groups.low(score_B)


def accuracy_range(
    score_B: torch.Tensor, group_B: torch.Tensor, *, low: float = 0.2, high: float = 0.8
) -> torch.Tensor:
    """Online prompt filtering: groups whose mean score lies in [low, high], both ends included. bool [B].

    Source: PRIME, https://arxiv.org/abs/2502.01456

    It takes any score; the default bounds are for accuracy, 0 or 1. ValueError: low above high.
    """
    if not low <= high:
        raise ValueError(f"accuracy_range needs low <= high, got {low} and {high}")
    score_B, groups = grouped(score_B, group_B)
    # The sum runs in order of score, not of arrival: a mean that lies on a bound must not fall off it by rounding.
    mean_B = groups.sum(score_B) / groups.size_N
    return (low <= mean_B) & (mean_B <= high)


FILTERS: dict[str, Callable[..., torch.Tensor]] = {
    "mixed": mixed,
    "accuracy_range": accuracy_range,
}


def whole_groups(keep_B: torch.Tensor, group_B: torch.Tensor, name: str = "the filter") -> torch.Tensor:
    """Check that a filter, perhaps a user's own, returned bool [B], alike within each group; return it.

    name: the function, for the message. ValueError: anything else.
    """
    if not isinstance(keep_B, torch.Tensor) or keep_B.dtype != torch.bool or keep_B.shape != group_B.shape:
        got = f"{keep_B.dtype} {list(keep_B.shape)}" if isinstance(keep_B, torch.Tensor) else type(keep_B).__name__
        raise ValueError(f"{name} must return a bool tensor [{len(group_B)}], one per sequence; it returned {got}")
    kept_B, groups = grouped(keep_B, group_B)
    some_B = groups.low(kept_B) != groups.high(kept_B)
    if bool(some_B.any()):
        split = torch.unique(group_B[some_B])[:8].tolist()
        raise ValueError(
            f"{name} kept only a part of groups {split}: it must decide alike for all samples of a prompt, because "
            "advantages compare them with each other"
        )
    return keep_B


def choose(kept_positions: torch.Tensor | Sequence[torch.Tensor], wanted: int) -> torch.Tensor:
    """Return the lowest `wanted` of the kept positions, or all if there are fewer: int64, ascending.

    kept_positions: int64, one tensor or one per rank or round, in any order; a position that occurs more than once (the
    samples of a prompt) counts once.
    """
    parts = [kept_positions] if isinstance(kept_positions, torch.Tensor) else list(kept_positions)
    assert wanted >= 0 and all(part.dtype == torch.int64 for part in parts), (wanted, [p.dtype for p in parts])
    return torch.unique(torch.cat(parts))[:wanted] if parts else torch.zeros(0, dtype=torch.int64)


def shortage(name: str, kept: int, sampled: int, wanted: int, rounds: int) -> str:
    """Return the message for a step that the filter `name` left short of prompts, with the flags to change.

    kept, sampled: prompts over all ranks and all `rounds`; wanted: prompts that the step needs.
    """
    rate = kept / sampled if sampled else 0.0
    shortfall = (
        f"the filter {name} kept {kept} of {sampled} prompts (acceptance rate {rate:.1%}) in {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}, and a step needs {wanted}: "
    )
    if not kept:
        return shortfall + (
            "look at the rewards in samples.jsonl, where every prompt may be too hard or too easy, and choose a milder "
            "--filter.keep; a higher --filter.max-rounds or a lower --rollout.prompts-per-step helps only where some "
            "prompts pass"
        )
    return shortfall + (
        f"raise --filter.max-rounds (to about {math.ceil(wanted * rounds / kept)} at this rate), choose a milder "
        f"--filter.keep, or lower --rollout.prompts-per-step (to {kept} or less)"
    )
