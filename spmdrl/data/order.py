"""Chooses the prompts to draw, by the seed and the number drawn before alone, for any world size."""

from functools import lru_cache

from spmdrl.spmd.seeds import generator_for

_ORDER = 0x0DE4  # keeps this stream of draws apart from others that are keyed by (seed, small number)


@lru_cache(maxsize=4)
def _epoch_order(n_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n_prompts))
    generator_for(seed, _ORDER, epoch).shuffle(order)
    return tuple(order)


def drawn_indices(n_prompts: int, first: int, count: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return the positions in the prompt list of the draws `first` .. `first + count - 1` of a run.

    Draws go through the epochs' permutations one after the other, or without `shuffle` through the list as it is.
    Draws that cross from one epoch into the next, or are more than the list has prompts, may contain a position twice.
    Raises ValueError on empty input.
    """
    if n_prompts < 1 or count < 0 or first < 0:
        raise ValueError(f"cannot draw {count} of {n_prompts} prompts after {first}")
    if not shuffle:
        return [i % n_prompts for i in range(first, first + count)]
    places = (divmod(i, n_prompts) for i in range(first, first + count))
    return [_epoch_order(n_prompts, seed, epoch)[place] for epoch, place in places]
