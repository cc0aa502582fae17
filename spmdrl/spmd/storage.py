"""Offloads tensors from their device to host memory or a file, or discards their contents, and restores them.

A storage is emptied in place (`resize_(0)`) and refilled later, so every tensor, view and DTensor shard that uses it
stays valid: FSDP2 parameters, tied weights and optimizer moments need no `module.to()`. Offloaded tensors are called
parked.
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
"""Storage for the contents of parked tensors. `host`: host memory, pinned if the device is a GPU. `disk`: an unnamed
file, which disappears with the process. `gone`: the contents are dropped, and undefined after restoring."""

PIECE = 64 << 20
"""Size of one host buffer in bytes. It is a power of two, because torch rounds pinned allocations up to a power of
two."""
WORTH_TRIMMING = 32 << 20
"""Minimum number of freed bytes that are returned to the OS. The allocator keeps smaller amounts."""


def moves(place: str, device: torch.device) -> bool:
    """Return True if parking at `place` frees memory on `device`. On a CPU, `host` frees nothing."""
    return place in ("disk", "gone") or (place == "host" and kind_of(device) != "cpu")


def storages_of(tensors: Iterable[torch.Tensor | None], device_type: str) -> list[torch.UntypedStorage]:
    """Return the distinct non-empty storages of tensors on a device type. For a DTensor, the storage of its local shard
    is used.
    """
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
    """Return the number of bytes that tensors occupy on a device type. Parked tensors count as 0."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device_type))


class Parked:
    """Parked tensors: their storages are empty. The tensors must not be read or written until `bring_back()`."""

    def __init__(self, tensors: Iterable[torch.Tensor | None], place: Place, device: torch.device):
        """Copy the tensors' bytes to `place` and free their memory on the device.

        tensors: the tensors to park. Tensors on another device type and parked tensors are skipped. device: device of
        the tensors.

        Raises OSError if the bytes do not fit in the temporary folder, and ValueError like `scratch_folder`. After an
        error, the tensors are unchanged.
        """
        self.place, self.device = place, device
        storages = storages_of(tensors, device.type)
        # (storage, bytes, offset in the copy) of each storage to restore. `bring_back` takes storages from the end of
        # this list.
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
        """Number of bytes off the device."""
        return sum(size for _, size, _ in self.waiting)

    def bring_back(self) -> None:
        """Reallocate every storage. Restore the contents, unless `forget` has dropped them.

        Raises RuntimeError if the device is out of memory (torch's own error). Storages restored so far stay restored,
        and another call restores the rest.
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
        """Drop the copy of the bytes, so that `bring_back` leaves the tensor contents undefined."""
        self.tape, self.place = None, "gone"


def give_back(device: torch.device, size: int) -> None:
    """Make the allocator release memory after `size` bytes were freed.

    glibc keeps freed blocks (see `environ.keep_freed_memory`). Without trimming, 600 MiB in 1 MiB tensors stay
    resident. Trimming takes 0.03 s, but the page faults on the next use cost more time. Host memory is therefore
    released to the OS only after parking on disk.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif size >= WORTH_TRIMMING:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as bytes, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(raw: torch.Tensor) -> memoryview:
    """Return a CPU tensor's bytes. `numpy()` would make its storage permanently non-resizable."""
    return memoryview((ctypes.c_uint8 * len(raw)).from_address(raw.data_ptr())).cast("B")


def _pieces(offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Split [offset, offset + size) at buffer boundaries. Yields (buffer, offset in the buffer, offset in the bytes,
    length).
    """
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
    """An unnamed temporary file, which disappears when the process exits, even if it is killed."""

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
    """Return $TMPDIR if set, else /var/tmp, which unlike /tmp is never in memory, else Python's default.

    Raises ValueError if TMPDIR is not a writable folder, because Python would silently use another folder.
    """
    named = os.environ.get("TMPDIR")
    if named:
        if not os.path.isdir(named) or not os.access(named, os.W_OK | os.X_OK):
            raise ValueError(f"TMPDIR {named} is not a writable folder: create it, or set TMPDIR to another")
        return named
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
