"""Defaults of the process: the environment before torch is imported, threads, the allocator.

Values that a user has set stay.
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
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Collectives that torch's recorder keeps for the flight record (health/flight_record.py), with their Python frames.
    "TORCH_FR_BUFFER_SIZE": "2000",
}

COLLECTIONS = gc.get_threshold()


def prepare() -> None:
    """Set defaults of libraries. Under torchrun this process ends with its agent, even if that was killed.

    torchrun gives one thread to each of several ranks; on GPUs `share_cores` sets another number.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def postpone_collections() -> None:
    """Postpone Python's full garbage collections until `keep_what_started`, which `open_run` calls."""
    gc.set_threshold(*COLLECTIONS[:2], 1 << 30)


def keep_what_started(done: bool = True) -> None:
    """Collect garbage once and exclude all objects of this moment from later collections.

    A start imports a million objects; full collections of them took 3 s of CPU on each rank. done: the start is over,
    so full collections follow Python's own rule again.
    """
    gc.collect()
    gc.freeze()
    if done:
        gc.set_threshold(*COLLECTIONS)


def torchrun_chose_one_thread() -> bool:
    """Return True if OMP_NUM_THREADS is 1 because the user has not set it: torchrun sets it for several ranks."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        # The environment of torchrun, the parent, lacks the variables that it sets for its ranks.
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(b"OMP_NUM_THREADS=") for each in given)


def share_cores() -> str:
    """Give torch this rank's share of the cores if torchrun chose one thread; return a line on the threads.

    For ranks on GPUs, whose hosts process billions of numbers (AdamW, checkpoints). Several ranks on a CPU keep one
    thread each.
    """
    import torch

    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torchrun_chose_one_thread():
        torch.set_num_threads(max(1, cores // ranks))
    return f"host     {torch.get_num_threads()} threads a rank; {ranks} ranks and {cores} cores on this machine"


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation instead of returning it to the kernel.

    Every step frees and allocates gigabytes of activations, gathered weights and logits, and the kernel clears each new
    page: page faults took 40% of the update of SmolLM2-135M on two ranks. `storage.give_back` returns memory to the
    kernel. Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_top_pad, m_mmap_max, never = -1, -2, -4, -1
    mallopt(m_trim_threshold, never)
    mallopt(m_top_pad, 64 << 20)
    mallopt(m_mmap_max, 0)
