"""Recognises causes of errors by their kinds and words: memory, disks, devices, other ranks."""

import errno
import re

import torch
from torch.distributed import DistError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def out_of_memory(error: BaseException) -> bool:
    """True for an allocator's refusal: torch's on GPU and CPU, vLLM's at wake, Python's, the system's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in str(error).lower() for w in words)


def lost_peer(error: BaseException) -> bool:
    """True where a collective broke because another rank is gone, or the store with it."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Failed to recv")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def timed_out(error: BaseException) -> bool:
    """True where a collective waited for a rank longer than `--run.timeout`, in words of gloo, NCCL or the store."""
    words = ("Timed out waiting", "Application timeout caused", "collective operation timeout", "wait timeout after")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def disk_full(error: BaseException) -> bool:
    """True where a write found no room, also when a library passes on only the words of the error."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in DISK_FULL:
            return True
        if any(words in str(chain) for words in ("No space left on device", "Disk quota exceeded", "File too large")):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def of_the_machine(error: BaseException) -> bool:
    """True for an error of memory, a disk, a device or another rank.

    Ranks meet an error of a model's code alike, and may go on together. One of these is met by a rank alone, while the
    others wait for it in a collective.
    """
    parts = OSError | torch.AcceleratorError | DistError
    return out_of_memory(error) or isinstance(error, parts) or lost_peer(error) or timed_out(error)


def requested_bytes(error: BaseException) -> int:
    """Bytes that the allocator was asked for, read from its message; 0 if the message does not say."""
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE):
        return int(found[1])
    if found := re.search(r"tried to allocate ([\d.]+) ([KMG])iB", text, re.IGNORECASE):
        return int(float(found[1]) * (1 << {"K": 10, "M": 20, "G": 30}[found[2].upper()]))
    return 0
