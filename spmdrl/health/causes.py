"""Recognises the causes of errors by type and message: memory, disks, devices, other ranks."""

import errno
import re

import torch
from torch.distributed import DistError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error from torch (GPU or CPU), vLLM (on wake-up), Python or the OS."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in str(error).lower() for w in words)


def lost_peer(error: BaseException) -> bool:
    """Return True if a collective failed because another rank, or the rank that hosts the store, is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Failed to recv")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def timed_out(error: BaseException) -> bool:
    """Return True if a collective exceeded `--run.timeout`, judging by the message from gloo, NCCL or the store."""
    words = ("Timed out waiting", "Application timeout caused", "collective operation timeout", "wait timeout after")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def disk_full(error: BaseException) -> bool:
    """Return True if a write failed because of a full disk, even if a library reports only the message."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in DISK_FULL:
            return True
        if any(words in str(chain) for words in ("No space left on device", "Disk quota exceeded", "File too large")):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def of_the_machine(error: BaseException) -> bool:
    """Return True for an error caused by memory, a disk, a device or another rank.

    Such an error can hit a single rank while the other ranks wait for it in a collective. An error in a model's code
    occurs on all ranks, so they can continue together.
    """
    parts = OSError | torch.AcceleratorError | DistError
    return out_of_memory(error) or isinstance(error, parts) or lost_peer(error) or timed_out(error)


def requested_bytes(error: BaseException) -> int:
    """Return the number of bytes that a failed allocation requested, or 0 if the error message does not say."""
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE):
        return int(found[1])
    if found := re.search(r"tried to allocate ([\d.]+) ([KMG])iB", text, re.IGNORECASE):
        return int(float(found[1]) * (1 << {"K": 10, "M": 20, "G": 30}[found[2].upper()]))
    return 0
