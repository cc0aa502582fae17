"""Which prompts are drawn: a function of the seed and of how many were drawn before, whatever the world size."""

from functools import lru_cache

from spmdrl.spmd.seeds import generator_for

_ORDER = 0x0DE4  # keeps this stream of draws apart from others that are keyed by (seed, small number)


@lru_cache(maxsize=4)
def _epoch_order(n_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n_prompts))
    generator_for(seed, _ORDER, epoch).shuffle(order)
    return tuple(order)


def drawn_indices(n_prompts: int, first: int, count: int, seed: int) -> list[int]:
    """Positions in the prompt list of the draws `first` .. `first + count - 1` of a run.

    The epochs' permutations stand end to end and draws go along that line. A stretch that crosses from one epoch into
    the next, or is longer than the list, may hold a position twice. Raises ValueError on empty input.
    """
    if n_prompts < 1 or count < 0 or first < 0:
        raise ValueError(f"cannot draw {count} of {n_prompts} prompts after {first}")
    places = (divmod(i, n_prompts) for i in range(first, first + count))
    return [_epoch_order(n_prompts, seed, epoch)[place] for epoch, place in places]
