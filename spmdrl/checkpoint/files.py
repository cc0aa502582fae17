"""Hashes, flushes and names the files of a checkpoint. No communication."""

import os
from pathlib import Path

import xxhash

from spmdrl.health.status import tick


def file_hash(path: Path) -> str:
    """Return the xxh3_128 hash of a file, in hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(16 << 20):
            state.update(block)
            tick()
    return state.hexdigest()


def flushed_hash(path: Path) -> str:
    """Hash a file that was just written, then flush it to the disk."""
    # Hashed before the flush, so that the hash is of the bytes written and not of the bytes that the disk returns.
    found = file_hash(path)
    flush(path)
    return found


def flush(path: Path) -> None:
    """Flush a file to the disk and out of the page cache, so that the next read sees the disk's bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    tick()


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, by a rename."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    os.replace(part, path)


def rank_name(rank: int) -> str:
    """Return the file name of one rank's own state."""
    return f"rank_{rank:05d}.safetensors"


def rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks' own state (`checkpoint/treefile.py` reads them), in rank order; may be empty."""
    return sorted((folder / "state" / "ranks").glob("rank_*.safetensors"))
