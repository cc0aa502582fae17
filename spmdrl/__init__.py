"""spmdrl: reinforcement learning for language models as one plain torchrun program."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# In a checkout, the packages that import nothing of this one stand in folders beside it, which an install maps.
for _folder in ("kernels", "sandbox"):
    _path = Path(__file__).resolve().parents[1] / _folder
    if (_path / f"spmdrl_{_folder}").is_dir() and str(_path) not in sys.path:
        sys.path.append(str(_path))
