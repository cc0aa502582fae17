"""Saves and restores the random number generators of Python, NumPy, torch and, on a GPU, the device.

Checkpoints contain the states, because user functions might draw random numbers. Code that reseeds the generators, such
as vLLM's startup, runs inside `unchanged_generators`, so that a run draws the same numbers with any engine.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def generator_states(device: torch.device) -> dict:
    """Return the states of all generators in a form that a checkpoint can store."""
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
    """Restore states returned by `generator_states`. The GPU generator's state is restored only on a GPU."""
    version, words, rest = states["python"]
    random.setstate((version, tuple(words.tolist()), rest))
    name, keys, *numbers = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *numbers))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Restore all generators when this context exits, even on an error."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)
