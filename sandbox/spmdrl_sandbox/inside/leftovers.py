"""Removes what a program has left in its folder. Standard library only: it runs inside the sandbox, too."""

import os


def remove(folder: str) -> None:
    """Remove a folder with all that is in it. No process may be at work there.

    Folders in it may be closed to their owner, or lie so deep that their path is longer than the kernel takes.

    Raises:
        OSError: something in it belongs to another user.
    """
    os.chmod(folder, 0o700)
    empty(folder)
    os.rmdir(folder)


def empty(folder: str) -> None:
    """Remove all that is in a folder: see `remove`."""
    # No name of a program's can be the same.
    moved, count = os.urandom(16).hex(), 0
    while inside := _entries(folder):
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for each in _entries(entry.path):
                if each.is_dir(follow_symlinks=False):
                    # Folders come up by one level at a time, so that no path grows. A move needs the right to write.
                    os.chmod(each.path, 0o700)
                    os.rename(each.path, os.path.join(folder, f"{moved}-{count}"))
                    count += 1
                else:
                    os.unlink(each.path)
            os.rmdir(entry.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
