"""Removes the files that a program has left in its folder. It needs only the standard library."""

import os


def remove(folder: str) -> None:
    """Remove a folder and its content. No other process may write to the folder during the call.

    The function also removes folders that deny access to their owner, and folders nested so deeply that the kernel
    rejects their path.

    Raises:
        OSError: a file or folder in it belongs to another user.
    """
    os.chmod(folder, 0o700)
    empty(folder)
    os.rmdir(folder)


def empty(folder: str) -> None:
    """Remove the content of a folder, but not the folder itself. The conditions and errors are those of `remove`."""
    # Moved folders get a random prefix, so that their names differ from those of existing folders.
    moved, count = os.urandom(16).hex(), 0
    while inside := _entries(folder):
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for each in _entries(entry.path):
                if each.is_dir(follow_symlinks=False):
                    # Move subfolders up by one level, so that paths stay short. A folder can be moved only by a user
                    # who may write to it.
                    os.chmod(each.path, 0o700)
                    os.rename(each.path, os.path.join(folder, f"{moved}-{count}"))
                    count += 1
                else:
                    os.unlink(each.path)
            os.rmdir(entry.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
