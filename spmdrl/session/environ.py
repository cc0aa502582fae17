"""Sets process defaults: environment variables (before torch is imported), threads and allocator.

Environment variables set by the user are kept.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

DEFAULTS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Number of collectives that torch's flight recorder keeps, for health/flight_record.py.
    "TORCH_FR_BUFFER_SIZE": "2000",
}

COLLECTIONS = gc.get_threshold()


def prepare() -> None:
    """Set library defaults. Under torchrun, have the kernel terminate this process if torchrun's agent dies."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def postpone_collections() -> None:
    """Postpone Python's full garbage collections until `keep_what_started`, which `open_run` calls."""
    gc.set_threshold(*COLLECTIONS[:2], 1 << 30)


def keep_what_started(done: bool = True) -> None:
    """Collect garbage once and exclude all current objects from later collections.

    Imports create about a million objects; full collections over them took 3 s of CPU time per rank. done: True once
    startup is complete, to restore Python's default collection schedule.
    """
    gc.collect()
    gc.freeze()
    if done:
        gc.set_threshold(*COLLECTIONS)


def torchrun_chose_one_thread() -> bool:
    """Return True if OMP_NUM_THREADS=1 was set by torchrun, which does so for several ranks, and not by the user."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        # torchrun is the parent process; its own environment lacks the variables that it sets for its ranks.
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(b"OMP_NUM_THREADS=") for each in given)


def share_cores() -> str:
    """Give torch this rank's share of the cores if torchrun chose one thread. Return a note for the console.

    Only GPU ranks call this: their host CPUs process billions of numbers for checkpoints, and for AdamW with
    `--policy.host-optimizer`. Ranks that train on a CPU keep the number of threads that torchrun or the user chose.
    """
    import torch

    from spmdrl.config.plan import count

    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torchrun_chose_one_thread():
        torch.set_num_threads(max(1, cores // ranks))
    machine = f"{count(ranks, 'rank')} and {count(cores, 'core')} on this machine"
    return f"host     {count(torch.get_num_threads(), 'thread')} a rank; {machine}"


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later allocations instead of returning it to the kernel.

    Every step frees and allocates gigabytes of activations, gathered weights and logits, and the kernel zeroes each new
    page: page faults took 40% of the update time for SmolLM2-135M on two ranks. `storage.give_back` returns memory to
    the kernel where needed. This function is a no-op without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_top_pad, m_mmap_max, never = -1, -2, -4, -1
    mallopt(m_trim_threshold, never)
    mallopt(m_top_pad, 64 << 20)
    mallopt(m_mmap_max, 0)
