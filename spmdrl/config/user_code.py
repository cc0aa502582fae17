"""Imports users' Python files, and formats their errors on one line."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def function_of(path: Path, name: str, ahead: bool = False) -> Callable[..., Any]:
    """Import a file and return its function `name`. ahead: as in `import_file`.

    Raises ValueError if the file cannot be imported (the message has file and line) or does not define the function.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path} (from {Path.cwd()})")
    module = import_file(path, ahead)
    function = getattr(module, name, None)
    if not callable(function):
        own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(
            f"{path} has no function {name!r} (it has: {', '.join(own) or 'none'}); name one as file.py:name"
        )
    return function


def import_file(path: Path, ahead: bool = False) -> ModuleType:
    """Import a user's file. The file can import others in its folder, and is imported again only after it has changed.

    ahead: whether files in the folder take precedence over installed packages of the same name, which suits processes
    that only run user code. Training ranks import packages lazily, and a user's file must not shadow one of them.

    Raises ValueError with file and line if the import fails.
    """
    return _imported(path.resolve(), path.stat().st_mtime_ns, ahead)


@cache
def _imported(path: Path, changed: int, ahead: bool) -> ModuleType:
    # The module name includes the folder, because files in different folders can have the same name.
    name = f"spmdrl_user_{'_'.join(path.with_suffix('').parts[1:])}"
    if str(path.parent) not in sys.path:
        sys.path.insert(0 if ahead else len(sys.path), str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the module look it up in sys.modules
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise ValueError(f"{e.filename or path}:{e.lineno}: {e.msg}") from e
    except BaseException as e:  # a user's file might also raise SystemExit
        raise ValueError(f"importing {path} raised {error_text(e)} ({place(e)})") from e
    return module


def error_text(e: BaseException) -> str:
    """Return an error's type and message on one line, even if formatting the message raises another error."""
    try:
        return printable(f"{type(e).__name__}: {e}")[:2000]
    except BaseException as inner:
        return f"{type(e).__name__}, whose text could not be made ({type(inner).__name__})"


def place(e: BaseException) -> str:
    """Return the file and line where an error was raised."""
    frames = traceback.extract_tb(e.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no line known"


def printable(text: str) -> str:
    """Return a text on one line without control characters, because parts of it might come from a model."""
    return "".join(char if char.isprintable() else " " for char in text)
