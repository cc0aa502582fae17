"""Writes an environment to begin with, and a test for it."""

import keyword
import sys
from importlib.machinery import PathFinder
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[1] / "assets" / "environment"
"""Texts for `str.format`."""


def scaffold(name: str) -> tuple[Path, Path]:
    """Write `NAME.py` and `test_NAME.py`, and return both. name: may begin with folders, which are created.

    Raises:
        ValueError: the name is not that of a Python module or is taken, or one of the files exists.
    """
    path = Path(name.removesuffix(".py"))
    stem = path.name
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise ValueError(f"{name!r} is no name of a Python module: take letters, digits and _")
    file, test = path.with_name(f"{stem}.py"), path.with_name(f"test_{stem}.py")
    for each in (file, test):
        if each.exists():
            raise ValueError(f"{each} is there already: take another name, or remove it")
    if stem in sys.stdlib_module_names or _is_installed(stem):
        raise ValueError(f"{stem} is a module of Python or of a package, which {file} would hide: take another name")
    kind = "".join(part[:1].upper() + part[1:] for part in stem.split("_")) or stem
    words = {"file": file.name, "test": test.name, "kind": kind if kind.isidentifier() else f"E{kind}"}
    file.parent.mkdir(parents=True, exist_ok=True)
    for each, template in ((file, "boxes.py.txt"), (test, "test_boxes.py.txt")):
        with each.open("x", encoding="utf-8") as out:  # a file that appeared meanwhile stays as it is
            out.write((TEMPLATES / template).read_text(encoding="utf-8").format(**words))
    return file, test


def _is_installed(name: str) -> bool:
    """Return whether a module of this name is found outside of the working directory."""
    spec = PathFinder.find_spec(name, [each for each in sys.path if each and Path(each).resolve() != Path.cwd()])
    return spec is not None and spec.loader is not None
