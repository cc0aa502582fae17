"""Which prompts a step takes: a function of (seed, step) alone, so resume needs no state and no world size."""

from functools import lru_cache

from spmdrl.spmd.seeds import generator_for

_ORDER = 0x0DE4  # keeps this stream of draws apart from others that are keyed by (seed, small number)


@lru_cache(maxsize=4)
def _epoch_order(n_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n_prompts))
    generator_for(seed, _ORDER, epoch).shuffle(order)
    return tuple(order)


def step_indices(n_prompts: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """Positions in the prompt list that step `step` (counted from 0) takes, `prompts_per_step` of them.

    The epochs' permutations stand end to end and the steps cut that line into equal pieces. A step that crosses from
    one epoch into the next, or is longer than the list, may hold a position twice. Raises ValueError on empty input.
    """
    if n_prompts < 1 or prompts_per_step < 1 or step < 0:
        raise ValueError(f"cannot draw {prompts_per_step} of {n_prompts} prompts at step {step}")
    first = step * prompts_per_step
    places = (divmod(i, n_prompts) for i in range(first, first + prompts_per_step))
    return [_epoch_order(n_prompts, seed, epoch)[place] for epoch, place in places]
