"""`--run.deterministic`: two runs of the same settings on the same layout are equal to the last bit.

Without it a run of a static assignment is so on a CPU already; what this adds is certainty. torch refuses operations
whose sums go in no fixed order, prompts have fixed engines (`config/layers.py` sets the static assignment), engines on
GPUs take batch-invariant kernels, and settings by which the clock decides are refused or named
(`config/engines.py`, `rl/build.py`). It costs speed.
"""

import os
import random

import numpy
import torch

from spmdrl.config.schema import RunConfig
from spmdrl.spmd.seeds import seed_for

ENVIRONMENT = {
    # cuBLAS: a workspace of fixed size for every stream, which torch asks for in this mode.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NVLS adds up in the switch, in the order in which values arrive.
    "NCCL_ALGO": "^NVLS",
    # flash-attn in transformers, and Transformer Engine in Megatron.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # Of processes that are started from this one: sets of theirs are walked through in the same order.
    "PYTHONHASHSEED": "0",
}
"""A user's own values stay."""


def make_deterministic(run: RunConfig) -> None:
    """Set torch and its libraries so, before the first of them starts.

    Without `--run.deterministic` the generators of this process are seeded, and that is all.
    """
    # The run's own draws are keyed by data; a user's loss may draw from these. Alike on every rank (law 3): those that
    # hold the same tokens (--parallel.sp) take the same loss from them.
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
