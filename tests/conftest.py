"""What must stand in the environment before torch is imported, for this process and for those that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

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
