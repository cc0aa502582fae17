"""A setting that names one of several things, or a function in a file of the user's."""

import ast
import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.config.fields import flag, nearest


def name_problems(name: str, value: str, valid: Collection[str], file_allowed: bool) -> list[str]:
    """One line if `value` is neither a valid name nor, where that is allowed, a function in a file."""
    if not value or value in valid:
        return []
    if file_allowed and ".py" in value:
        return file_problems(name, value, default="")
    near = nearest(value, valid)
    hint = f"; did you mean {near[0]}?" if near else "."
    more = ", or path/to/file.py:function" if file_allowed else ""
    return [f"{flag(name)} {value}: unknown{hint} Valid: {', '.join(valid)}{more}"]


def file_problems(name: str, value: str, default: str) -> list[str]:
    """A user's function must be at the top of an existing file. The file is read, not run."""
    path, _, function = value.rpartition(":") if not value.endswith(".py") else (value, "", default)
    if not function:
        return [f"{flag(name)} {value}: name the function too, as in {value.rstrip(':')}:my_function"]
    if not Path(path).is_file():
        return [f"{flag(name)} {value}: there is no file {path} (from {Path.cwd()})"]
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError, OSError) as error:
        return [f"{flag(name)} {value}: {path} cannot be read as Python: {error}"]
    defined: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name) for alias in node.names}
    if function not in defined and "*" not in defined:
        near = nearest(function, sorted(defined))
        return [f"{flag(name)} {value}: {path} defines no {function}" + (f"; did you mean {near[0]}?" if near else "")]
    return []


def function_tables() -> dict[str, Mapping[str, Any]]:
    """Return the functions that settings choose from, by the setting."""
    # Late, as algos/ needs torch and `--help` must not.
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES
    from spmdrl.algos.preference import LOSSES as PREFERENCE_LOSSES

    return {
        "algo.advantage": ADVANTAGES,
        "algo.loss": LOSSES,
        "filter.keep": FILTERS,
        "preference.loss": PREFERENCE_LOSSES,
    }


def load_function(spec: str, table: Mapping[str, Any]) -> Any:
    """An entry of the table by name, or the user's own function by `path/to/file.py:function`.

    Raises:
        ValueError: no such name, file or function, or a file that fails when it is run.
    """
    if spec in table:
        return table[spec]
    path, _, name = spec.partition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{spec!r} is none of {', '.join(table)}, nor path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist (from {spec!r})")
    try:
        module = _module(path, Path(path).stat().st_mtime_ns)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error} (from {spec!r})") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name} (from {spec!r})")
    return getattr(module, name)


@cache
def _module(path: str, changed: int) -> ModuleType:
    """A user's file, run once. changed: when it was written."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
