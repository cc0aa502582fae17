"""Makes two runs of the same settings and layout equal to the last bit (`--run.deterministic`).

The flag has these effects: torch refuses operations that sum in varying order; each prompt goes to a fixed engine
(`config/layers.py` sets the static assignment); engines on GPUs use batch-invariant kernels; settings whose effect
depends on time are refused or named in a warning (`config/engines.py`, `rl/build.py`). Runs become slower. On a CPU, a
run with the static assignment is usually deterministic even without the flag.

Checkpoints contain the states of the process's random number generators, because a user's function may draw from them.
"""

import os
import random

import numpy
import torch

from spmdrl.config.schema import RunConfig
from spmdrl.spmd.seeds import seed_for

ENVIRONMENT = {
    # This gives cuBLAS a workspace of fixed size for every stream, which torch requires for deterministic algorithms.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NVLS is excluded, as the network switch sums values in the order in which they arrive.
    "NCCL_ALGO": "^NVLS",
    # flash-attn in transformers reads the first of the next two variables, Megatron's Transformer Engine the second.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # With a fixed hash seed, child processes iterate over sets in the same order.
    "PYTHONHASHSEED": "0",
}
"""Environment variables that `--run.deterministic` sets, unless the user has set them."""


def make_deterministic(run: RunConfig) -> None:
    """Seed the process's generators and, with `--run.deterministic`, make torch and its libraries deterministic.

    It must be called before these libraries are initialized.
    """
    # This project seeds each of its random draws by the data, but a user's loss may draw from these generators. Their
    # seed is equal on all ranks, so that ranks with the same tokens (--parallel.sp) compute the same loss.
    seed = seed_for(run.seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if not run.deterministic:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def generator_states(device: torch.device) -> dict:
    """Return the states of the random number generators of Python, NumPy, torch and, if it is a GPU, the device."""
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
