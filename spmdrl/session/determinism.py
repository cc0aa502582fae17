"""Makes two runs of the same settings and layout equal to the last bit (`--run.deterministic`).

On a CPU a run with a static assignment is deterministic without the flag; the flag makes it certain. torch refuses
operations that sum in varying order, prompts have fixed engines (`config/layers.py` sets the static assignment),
engines on GPUs take batch-invariant kernels, and settings whose effect depends on the clock are refused or named in a
warning (`config/engines.py`, `rl/build.py`). It costs speed. Checkpoints hold the states of the process's random number
generators, because a user's function may draw from them.
"""

import os
import random

import numpy
import torch

from spmdrl.config.schema import RunConfig
from spmdrl.spmd.seeds import seed_for

ENVIRONMENT = {
    # cuBLAS: a workspace of fixed size for every stream, which torch requires in this mode.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NVLS sums in the switch, in the order in which values arrive.
    "NCCL_ALGO": "^NVLS",
    # flash-attn in transformers, and Transformer Engine in Megatron.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # Child processes iterate over sets in the same order.
    "PYTHONHASHSEED": "0",
}
"""Defaults; a user's own values stay."""


def make_deterministic(run: RunConfig) -> None:
    """Set torch and its libraries before the first of them starts; without the flag, only seed the generators."""
    # The run's own draws are keyed by data, but a user's loss may draw from these generators. The seed is equal on all
    # ranks (law 3), so that ranks with the same tokens (--parallel.sp) compute the same loss.
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
    """Return the states of the process's generators: Python's, NumPy's, torch's, the device's."""
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
    """Restore the states of `generator_states`; a GPU's only on a GPU."""
    version, words, rest = states["python"]
    random.setstate((version, tuple(words.tolist()), rest))
    name, keys, *numbers = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *numbers))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
