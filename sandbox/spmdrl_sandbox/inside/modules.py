"""Imports common modules before programs start, and replaces a part of `site`. It needs only the standard library.

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
    """Import the next module of `COMMON`; return False if none is left after that."""
    if _left:
        __import__(_left.pop())
    return bool(_left)


def like_site() -> None:
    """Append the package folders to `sys.path` and define builtins such as `exit`, as `site` would do."""
    if not sys.flags.no_site:
        return
    import site

    sys.path += [folder for folder in site.getsitepackages() if folder not in sys.path and os.path.isdir(folder)]
    site.setquit()
    site.setcopyright()
    site.sethelper()
