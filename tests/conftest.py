"""Sets the environment before torch is imported, for this process and for the processes that tests start."""

import json
import os
import signal
from pathlib import Path

from tests.budget import (  # noqa: F401 (hooks)
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

ROOT = Path(__file__).resolve().parents[1]
GPUS = ROOT / "tests" / "gpu"
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
"""Values with which a process sees no GPU."""
GIVEN = "SPMDRL_TESTS_GIVEN"
"""Variable that is set while GPUs are hidden: the original variables of HIDDEN as JSON, for tests/gpu."""

# A shell starts background processes with Ctrl-C ignored. Jobs to which tests send Ctrl-C would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Ranks share the cores; more threads than cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ranks record their collectives, as in a run (`session/environ.py`).
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
# No test needs the network; offline, one that asks for it fails instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Ranks and torchrun need the packages too; pytest's `pythonpath` applies only to its own process.
_paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "sandbox")]
_old = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and str(Path(p).resolve()) not in _paths]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths + _old)


def pytest_configure(config):
    """Hides the GPUs unless only tests/gpu is run, so that all other tests run on CPUs on any machine.

    This hook runs before tests are collected, and therefore before torch asks the driver.
    """
    asked = [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]
    if asked and all(path.is_relative_to(GPUS) for path in asked):
        return
    os.environ.setdefault(GIVEN, json.dumps({name: os.environ.get(name) for name in HIDDEN}))
    os.environ.update(HIDDEN)
