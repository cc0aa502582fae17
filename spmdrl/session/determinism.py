"""Makes runs with the same settings and layout bitwise reproducible (`--run.deterministic`).

With this flag, torch raises an error for operations without a deterministic implementation. Each prompt goes to a fixed
engine (`config/layers.py` sets static assignment). vLLM and SGLang use batch-invariant kernels on GPUs. Settings whose
effect depends on timing are rejected or cause a warning (`config/engines.py`, `rl/build.py`). Runs become slower. On a
CPU, a run with static assignment is usually deterministic even without the flag.
"""

import os
import random

import numpy
import torch

from spmdrl.config.schema import RunConfig
from spmdrl.spmd.seeds import seed_for

ENVIRONMENT = {
    # Gives cuBLAS a fixed-size workspace per stream, which torch requires for deterministic algorithms.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Excludes NVLS, because the network switch sums values in order of arrival.
    "NCCL_ALGO": "^NVLS",
    # flash-attn in transformers reads the first of the next two variables. Megatron's Transformer Engine reads the
    # second.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # With a fixed hash seed, child processes iterate over sets in the same order.
    "PYTHONHASHSEED": "0",
}
"""Environment variables that `--run.deterministic` sets, unless the user has set them."""


def make_deterministic(run: RunConfig) -> None:
    """Seed the global generators and, with `--run.deterministic`, make torch and its libraries deterministic.

    Call this function before these libraries are initialized.
    """
    # Our own random draws are seeded from data, but a user-defined loss may draw from these generators. All ranks use
    # the same seed, so that ranks with the same tokens (--parallel.sp) compute the same loss.
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
