"""Recognises an allocator that ran out of memory."""

import errno
import re

import torch


def out_of_memory(error: BaseException) -> bool:
    """True for an allocator's refusal: torch's on GPU and CPU, vLLM's at wake, Python's, the system's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in str(error).lower() for w in words)


def requested_bytes(error: BaseException) -> int:
    """Bytes that the allocator was asked for, read from its message; 0 if the message does not say."""
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE):
        return int(found[1])
    if found := re.search(r"tried to allocate ([\d.]+) ([KMG])iB", text, re.IGNORECASE):
        return int(float(found[1]) * (1 << {"K": 10, "M": 20, "G": 30}[found[2].upper()]))
    return 0
