"""Makes two runs of the same settings and layout equal to the last bit (`--run.deterministic`).

The flag has these effects: torch refuses operations that sum in varying order; each prompt goes to a fixed engine
(`config/layers.py` sets the static assignment); vLLM and SGLang on GPUs use batch-invariant kernels; settings whose
effect depends on timing are refused or named in a warning (`config/engines.py`, `rl/build.py`). Runs become slower. On
a CPU, a run with the static assignment is usually deterministic even without the flag.
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
