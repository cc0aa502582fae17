"""The random number generators that belong to the process, for checkpoints: a user's function may draw from them."""

import random

import numpy
import torch


def generator_states(device: torch.device) -> dict:
    """States of the process's generators: Python's, NumPy's, torch's, the device's."""
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
    """Back to `generator_states`; a device's only on such a device."""
    version, words, rest = states["python"]
    random.setstate((version, tuple(words.tolist()), rest))
    name, keys, *numbers = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *numbers))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
