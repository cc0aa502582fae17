"""Sets the environment before torch is imported, for this process and for those that tests start."""

import json
import os
from pathlib import Path

from tests.budget import pytest_runtest_logreport, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 (hooks)

ROOT = Path(__file__).resolve().parents[1]
GPUS = ROOT / "tests" / "gpu"
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
"""No GPU is seen with these."""
GIVEN = "SPMDRL_TESTS_GIVEN"
"""Set while GPUs are hidden: the variables of HIDDEN as they were, in JSON, for tests/gpu."""

# Ranks share the cores; more threads than cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ranks record their collectives, as in a run (`environment.prepare`).
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
# Nothing in the suite needs the network, and a test that waits for it is not seen to.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Ranks and torchrun find the packages as pytest does (its `pythonpath` holds for its own process only).
_paths = [str(ROOT), str(ROOT / "kernels")]
_old = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and str(Path(p).resolve()) not in _paths]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths + _old)


def pytest_configure(config):
    """Hide the GPUs unless tests/gpu alone is asked for: a run of the other tests is one on CPUs, on any machine.

    Before tests are collected, so before torch asks the driver.
    """
    asked = [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]
    if asked and all(path.is_relative_to(GPUS) for path in asked):
        return
    os.environ.setdefault(GIVEN, json.dumps({name: os.environ.get(name) for name in HIDDEN}))
    os.environ.update(HIDDEN)
