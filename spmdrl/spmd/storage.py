"""Moves tensors off their device and back: their bytes go to host memory, to a file, or nowhere.

A storage is emptied in place (`resize_(0)`) and filled again later, so every tensor, view and DTensor shard over it
stays valid: FSDP2's parameters, tied weights and an optimizer's moments need no `module.to()`. In between, the tensors
are called parked.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

import torch

from spmdrl.spmd.devices import kind_of

Place = Literal["host", "disk", "gone"]
"""Place of parked tensors' bytes. `host`: host memory, pinned if the device is a GPU. `disk`: an unnamed file, which
disappears with the process. `gone`: nowhere; the content is undefined when the tensors come back."""

PIECE = 64 << 20
"""Bytes of one host buffer: a power of two, to which torch would round up pinned memory anyway."""
WORTH_TRIMMING = 32 << 20
"""Freed memory of at least this number of bytes is returned to the system; the allocator keeps smaller amounts."""


def moves(place: str, device: torch.device) -> bool:
    """Return True if parking at `place` frees memory of `device`; a CPU's memory is host memory already."""
    return place in ("disk", "gone") or (place == "host" and kind_of(device) != "cpu")


def storages_of(tensors: Iterable[torch.Tensor | None], device_type: str) -> list[torch.UntypedStorage]:
    """Return the distinct non-empty storages of tensors on a type of device; for a DTensor, its local shard's."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        # `to_local()` would add an autograd node for every tensor in every phase.
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.nbytes() and storage.device.type == device_type:
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def storage_bytes(tensors: Iterable[torch.Tensor | None], device_type: str) -> int:
    """Return the number of bytes that tensors hold on a type of device; parked tensors count 0."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device_type))


class Parked:
    """Emptied storages of tensors. Nothing may read or write the tensors until `bring_back()`."""

    def __init__(self, tensors: Iterable[torch.Tensor | None], place: Place, device: torch.device):
        """Copy the bytes to `place` and free their memory on the device.

        tensors: tensors on another type of device and parked tensors are skipped. device: device of the tensors.

        Raises OSError if the folder for temporary files cannot hold the bytes, and ValueError as `scratch_folder` does;
        the tensors are then unchanged.
        """
        self.place, self.device = place, device
        storages = storages_of(tensors, device.type)
        # (storage, bytes, offset in the copy) of the storages to bring back; `bring_back` takes them from the end.
        self.waiting: list[tuple[torch.UntypedStorage, int, int]] = []
        total = 0
        for storage in storages:
            assert storage.resizable(), "only memory that torch allocated itself can be freed"
            self.waiting.append((storage, storage.nbytes(), total))
            total += storage.nbytes()
        self.tape = _tape(place, total, device) if total else None
        if self.tape:
            for storage, _, offset in self.waiting:
                self.tape.write(offset, _raw(storage))
        if device.type == "cuda":
            # Wait until the copies are done and FSDP's other streams have finished reading.
            torch.cuda.synchronize(device)
        for storage in storages:
            storage.resize_(0)
        if place == "disk" or device.type == "cuda":
            give_back(device, total)

    @property
    def bytes(self) -> int:
        """Bytes that are off the device."""
        return sum(size for _, size, _ in self.waiting)

    def bring_back(self) -> None:
        """Allocate every storage again and fill it, unless its bytes are gone.

        Raises RuntimeError if the device is out of memory (torch's own error). Storages that were already restored keep
        their memory, and a further call restores the others.
        """
        while self.waiting:
            storage, size, offset = self.waiting[-1]
            storage.resize_(size)
            if self.tape:
                self.tape.read(offset, _raw(storage))
            self.waiting.pop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.tape = None

    def forget(self) -> None:
        """Drop the copy of the bytes; `bring_back` then leaves the content of the tensors undefined."""
        self.tape, self.place = None, "gone"


def give_back(device: torch.device, size: int) -> None:
    """Make the allocator return memory to the device after `size` bytes were freed.

    glibc keeps freed blocks (see `environ.keep_freed_memory`): without the trim, 600 MiB in tensors of 1 MiB stay
    resident; trimming them takes 0.03 s. The page faults that follow when the memory is used again take longer, so a
    CPU's memory is returned only after parking on disk.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif size >= WORTH_TRIMMING:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(raw: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU. `numpy()` would make its storage permanently non-resizable."""
    return memoryview((ctypes.c_uint8 * len(raw)).from_address(raw.data_ptr())).cast("B")


def _pieces(offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut [offset, offset + size) at buffer borders; yield (buffer, offset in it, offset in the bytes, length)."""
    done = 0
    while done < size:
        buffer, start = divmod(offset + done, PIECE)
        length = min(size - done, PIECE - start)
        yield buffer, start, done, length
        done += length


class _Host:
    """Host memory in buffers of PIECE bytes."""

    def __init__(self, total: int, pinned: bool):
        sizes = [min(PIECE, total - start) for start in range(0, total, PIECE)]
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def write(self, offset: int, raw: torch.Tensor) -> None:
        for buffer, start, at, n in _pieces(offset, len(raw)):
            self.buffers[buffer][start : start + n].copy_(raw[at : at + n], non_blocking=True)

    def read(self, offset: int, raw: torch.Tensor) -> None:
        for buffer, start, at, n in _pieces(offset, len(raw)):
            raw[at : at + n].copy_(self.buffers[buffer][start : start + n], non_blocking=True)


class _Disk:
    """A temporary file without a name, which disappears with the process, however the process ends."""

    def __init__(self, total: int, pinned: bool):
        folder = scratch_folder()
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this object is)
        try:
            os.posix_fallocate(self.file.fileno(), 0, total)
        except OSError as error:
            self.file.close()
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{folder} has no room for the {total / 2**30:.2f} GiB that `--policy.offload disk` or "
                "`--reference.offload disk` parks there: point TMPDIR at a larger disk",
            ) from error
        self.bounce = torch.empty(min(PIECE, total), dtype=torch.uint8, pin_memory=True) if pinned else None

    def write(self, offset: int, raw: torch.Tensor) -> None:
        for _, _, at, n in _pieces(offset, len(raw)):
            part = raw[at : at + n]
            if self.bounce is not None:
                part = self.bounce[:n].copy_(part)
            view = _memory(part)
            while len(view):
                done = os.pwrite(self.file.fileno(), view, offset + at + n - len(view))
                view = view[done:]

    def read(self, offset: int, raw: torch.Tensor) -> None:
        for _, _, at, n in _pieces(offset, len(raw)):
            part = raw[at : at + n] if self.bounce is None else self.bounce[:n]
            view = _memory(part)
            while len(view):
                done = os.preadv(self.file.fileno(), [view], offset + at + n - len(view))
                assert done, "the file is as long as what was written"
                view = view[done:]
            if self.bounce is not None:
                raw[at : at + n].copy_(part)


def _tape(place: Place, total: int, device: torch.device) -> _Host | _Disk | None:
    kind = {"host": _Host, "disk": _Disk}.get(place)
    return kind and kind(total, pinned=device.type != "cpu")


def scratch_folder() -> str:
    """Return $TMPDIR if it is set, else /var/tmp, which unlike /tmp is never in memory, else Python's choice.

    Raises ValueError if TMPDIR is not a writable folder, because Python would silently use another folder.
    """
    named = os.environ.get("TMPDIR")
    if named:
        if not os.path.isdir(named) or not os.access(named, os.W_OK | os.X_OK):
            raise ValueError(f"TMPDIR {named} is not a writable folder: create it, or set TMPDIR to another")
        return named
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
