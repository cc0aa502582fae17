"""spmdrl: reinforcement learning for language models as one plain torchrun program."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# In a checkout, the packages `spmdrl_kernels` and `spmdrl_sandbox` are in sibling folders that are not on sys.path; an
# installed spmdrl already has them there.
_root = Path(__file__).resolve().parents[1]
for _folder in ("kernels", "sandbox"):
    _path = str(_root / _folder)
    if (_root / _folder / f"spmdrl_{_folder}").is_dir() and _path not in sys.path:
        # Insert the folder right after the checkout's own entry, so that it takes precedence over another installed
        # version.
        sys.path.insert(sys.path.index(str(_root)) + 1 if str(_root) in sys.path else len(sys.path), _path)
