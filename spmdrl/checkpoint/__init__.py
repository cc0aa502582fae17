"""Checkpoints: written under a temporary name, verified by a manifest, published by one rename.

checkpoints/step_<N>/model/         HF safetensors in the run's type, config, tokenizer; opens in transformers and vLLM
checkpoints/step_<N>/state/         run.json, config.yaml, ranks/, optimizer (torch.distributed.checkpoint: moments, and
                                    the float32 weights of a run in bfloat16)
checkpoints/step_<N>/<name>/        model/ and state/ of a critic or another model that trains
checkpoints/step_<N>/MANIFEST.json  size and hash of every file, step, ranks, layout, versions; without it no checkpoint
checkpoints/latest                  link to the newest
checkpoints/measured.json           metrics of each checkpoint, measured after it was saved (--checkpoint.best)

files.py          hashes, flushes and names of files; this module and the next three do not import torch
manifest.py       writes and reads manifests, and compares them with the files
published.py      lists a run's checkpoints, finds the newest whole one, publishes one
keep.py           chooses the checkpoints to keep: the newest, those of some steps, the best by a metric
store.py          all ranks together write and read a checkpoint
treefile.py       plain values and tensors as one safetensors file
background.py     writes checkpoints in the step, or in a thread while training continues
folder.py         the run folder at the start of a run
lock.py           locks a run folder for one job at a time
disk_space.py     checks disk space before a write, and reports a full disk
file_progress.py  counts the growth of files as progress
compare.py        lists the differences of two checkpoints
__main__.py       python -m spmdrl.checkpoint list, verify, diff
"""

from typing import TYPE_CHECKING, Any

from spmdrl.checkpoint.files import rank_files
from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import newest_valid, steps_saved

if TYPE_CHECKING:
    from spmdrl.checkpoint.background import Saver
    from spmdrl.checkpoint.folder import (
        check_evaluation,
        check_settings,
        first_day,
        take_folder,
        write_config,
        write_first_day,
    )
    from spmdrl.checkpoint.store import find_resume, load, save

__all__ = [
    "Saver",
    "check_evaluation",
    "check_settings",
    "find_resume",
    "first_day",
    "load",
    "newest_valid",
    "problems",
    "rank_files",
    "save",
    "steps_saved",
    "take_folder",
    "write_config",
    "write_first_day",
]


def __getattr__(name: str) -> Any:
    # Modules that communicate import torch, which would slow the command line down.
    from importlib import import_module

    for module in ("store", "background", "folder") if name in __all__ else ():
        found = import_module(f"spmdrl.checkpoint.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(name)
