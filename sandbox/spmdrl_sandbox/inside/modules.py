"""Modules of programs: those that short programs import, and what Python adds at its start. Standard library only.

A sandbox starts Python without `site` (-S), which reads the `.pth` files of all packages and runs the code in them.
"""

import os
import sys

COMMON = [
    *("collections", "functools", "math", "itertools", "re", "string", "heapq", "bisect", "copy", "random"),
    *("datetime", "decimal", "fractions", "statistics", "typing", "traceback"),
]
"""Imported before programs start, so that a copy of this process has them already."""
_left = COMMON[::-1]


def load_one() -> bool:
    """Import one of `COMMON`; False if none is left."""
    if _left:
        __import__(_left.pop())
    return bool(_left)


def like_site() -> None:
    """Add what `site` gives programs: the folders of packages at the end of the path, and `exit` and its like."""
    if not sys.flags.no_site:
        return
    import site

    sys.path += [folder for folder in site.getsitepackages() if folder not in sys.path and os.path.isdir(folder)]
    site.setquit()
    site.setcopyright()
    site.sethelper()
