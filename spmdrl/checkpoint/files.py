"""Files of a checkpoint: hashes, flushes to the disk, names of the ranks' own files. No communication."""

import os
from pathlib import Path

import xxhash

from spmdrl.health.status import tick


def file_hash(path: Path) -> str:
    """xxh3_128 of a file, hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(16 << 20):
            state.update(block)
            tick()
    return state.hexdigest()


def flushed_hash(path: Path) -> str:
    """Hashes a file that was just written, then flushes it to the disk."""
    # The hash comes first, so that it is of the bytes written and not of those that the disk made of them.
    found = file_hash(path)
    flush(path)
    return found


def flush(path: Path) -> None:
    """Flushes a file to the disk and out of the page cache, so that the next read sees the disk's bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    tick()


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a file beside it first, then renamed over it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    os.replace(part, path)


def rank_name(rank: int) -> str:
    """File of one rank's own state."""
    return f"rank_{rank:05d}.safetensors"


def rank_files(folder: Path) -> list[Path]:
    """Files of the ranks' own state (`data/treefile.py` reads them), in rank order; empty where there are none."""
    return sorted((folder / "state" / "ranks").glob("rank_*.safetensors"))
