"""spmdrl: reinforcement learning for language models as one plain torchrun program."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# In a checkout, the packages that import nothing of this one stand in folders beside it, which an install maps.
_root = Path(__file__).resolve().parents[1]
for _folder in ("kernels", "sandbox"):
    _path = str(_root / _folder)
    if (_root / _folder / f"spmdrl_{_folder}").is_dir() and _path not in sys.path:
        # Right behind the checkout: a package of the same name that is installed belongs to another one.
        sys.path.insert(sys.path.index(str(_root)) + 1 if str(_root) in sys.path else len(sys.path), _path)
