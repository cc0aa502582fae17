"""States of the process's random number generators: those of Python, NumPy, torch, and the device if it is a GPU.

Checkpoints contain them, because a user's function may draw from them. Code that seeds them, such as the start of
vLLM, runs inside `unchanged_generators`, so that a run draws the same numbers with any engine.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def generator_states(device: torch.device) -> dict:
    """Return the states of all generators, as values that a checkpoint can hold."""
    version, words, rest = random.getstate()
    name, keys, *numbers = numpy.random.get_state(legacy=True)
    states = {
        "python": (version, torch.tensor(words, dtype=torch.int64), rest),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys, "int64")), *numbers),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict, device: torch.device) -> None:
    """Restore a result of `generator_states`. The state of a GPU's generator is restored only on a GPU."""
    version, words, rest = states["python"]
    random.setstate((version, tuple(words.tolist()), rest))
    name, keys, *numbers = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *numbers))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Restore all generators at the end of this context, also after an error."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)
