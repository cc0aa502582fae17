"""The cache of model folders created by spmdrl, in `$SPMDRL_CACHE` or by default `~/.cache/spmdrl`."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

LOCK_SECONDS = 1800.0


def cache() -> Path:
    """Return the cache folder."""
    return Path(os.environ.get("SPMDRL_CACHE") or "~/.cache/spmdrl").expanduser()


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` in the model cache, which `make` fills on the first call.

    One process creates the folder while others wait for a file lock, which is released when its holder exits. The
    folder is moved into place once complete. Raises TimeoutError if the lock is not released within LOCK_SECONDS.
    """
    from filelock import FileLock, Timeout

    folder = cache() / "models" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{name}.lock")
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            if not folder.is_dir():
                _make(folder, make)
    except Timeout:
        raise TimeoutError(f"waited {LOCK_SECONDS:.0f} s for the process that holds the lock {lock}") from None
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(temporary)
        for part in temporary.rglob("*"):
            # A tokenizer with several chat templates writes a folder; symlinks point to files that are already on disk.
            if part.is_file() and not part.is_symlink():
                with open(part, "rb") as handle:
                    os.fsync(handle.fileno())
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # another host may have created it, if file locks do not work across hosts
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
