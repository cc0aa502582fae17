"""Imports common modules ahead of programs, and replaces a part of `site`. It only needs the standard library.

A sandbox starts Python without `site` (-S), which would read the `.pth` files of all packages and run code in them.
"""

import os
import sys

COMMON = [
    *("collections", "functools", "math", "itertools", "re", "string", "heapq", "bisect", "copy", "random"),
    *("datetime", "decimal", "fractions", "statistics", "typing", "traceback"),
]
"""Modules that are imported before programs start, so that forked processes have them already."""
_left = COMMON[::-1]


def load_one() -> bool:
    """Import the next module of `COMMON`; return False if it was the last."""
    if _left:
        __import__(_left.pop())
    return bool(_left)


def like_site() -> None:
    """Add the package folders to the end of `sys.path`, and builtins such as `exit`, as `site` would do."""
    if not sys.flags.no_site:
        return
    import site

    sys.path += [folder for folder in site.getsitepackages() if folder not in sys.path and os.path.isdir(folder)]
    site.setquit()
    site.setcopyright()
    site.sethelper()
