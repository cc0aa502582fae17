"""Checkpoints: written beside, verified by a manifest, published by one rename.

checkpoints/step_<N>/model/         HF safetensors in the run's type, config, tokenizer: opens in transformers and vLLM
checkpoints/step_<N>/state/         run.json, config.yaml, ranks/, optimizer (torch.distributed.checkpoint: moments, and
                                    the float32 weights of a run in bfloat16)
checkpoints/step_<N>/<name>/        model/ and state/ of a critic or another model that learns
checkpoints/step_<N>/MANIFEST.json  size and hash of every file, step, ranks, layout, versions; none: no checkpoint
checkpoints/latest                  link to the newest
checkpoints/measured.json           what was measured of each (--checkpoint.best), after it was saved

files.py          hashes, flushes and names of files; with the next three, needs no torch
manifest.py       the manifest of a checkpoint: written, read, held against the files
published.py      checkpoints of a run: which are there, the newest whole one, publishing one
keep.py           which checkpoints stay: the newest, of some steps, the best by a metric
store.py          checkpoints written and read by all ranks together
background.py     checkpoints written in the step, or in a thread while training goes on
folder.py         the run folder at the start of a run
lock.py           one job at a time in a run folder
disk_space.py     room on the disk: checked before a write, reported when it ran out
file_progress.py  growth of files as a sign of life
compare.py        differences of two checkpoints
__main__.py       python -m spmdrl.checkpoint list, verify, diff
"""

from typing import TYPE_CHECKING, Any

from spmdrl.checkpoint.files import rank_files
from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import newest_valid, steps_saved

if TYPE_CHECKING:
    from spmdrl.checkpoint.background import Saver
    from spmdrl.checkpoint.folder import check_evaluation, check_settings, take_folder, write_config
    from spmdrl.checkpoint.store import find_resume, load, save

__all__ = [
    "Saver",
    "check_evaluation",
    "check_settings",
    "find_resume",
    "load",
    "newest_valid",
    "problems",
    "rank_files",
    "save",
    "steps_saved",
    "take_folder",
    "write_config",
]


def __getattr__(name: str) -> Any:
    # Modules that communicate import torch, for which the command line would wait.
    from importlib import import_module

    for module in ("store", "background", "folder") if name in __all__ else ():
        found = import_module(f"spmdrl.checkpoint.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(name)
