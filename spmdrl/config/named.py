"""Settings that name a function, either built-in or in a user's file, and entries of the form `name=weight`."""

import ast
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spmdrl.config.fields import flag, nearest
from spmdrl.config.user_code import function_of


def name_problems(name: str, value: str, valid: Collection[str], file_allowed: bool) -> list[str]:
    """Return a line unless `value` is empty, one of `valid` or, with `file_allowed`, a function in a file."""
    if not value or value in valid:
        return []
    if file_allowed and ".py" in value:
        return file_problems(name, value, default="")
    near = nearest(value, valid)
    hint = f"; did you mean {near[0]}?" if near else "."
    more = ", or path/to/file.py:function" if file_allowed else ""
    return [f"{flag(name)} {value}: unknown{hint} Valid: {', '.join(valid)}{more}"]


def file_problems(name: str, value: str, default: str) -> list[str]:
    """Return a line unless `value` names something defined in an existing file; the file is parsed but not run.

    name: the setting. default: function name to use if `value` is only a path; if empty, `value` must include the name.
    """
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
    """Return dotted name of a setting -> table of the functions that the setting can name."""
    # Lazy imports: algos/ needs torch, but `--help` must work without it.
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
    """Return the table entry for `spec`, or the user's function if it is `path/to/file.py:function`.

    Raises ValueError if the name, file or function does not exist, or if importing the file raises an error.
    """
    if spec in table:
        return table[spec]
    path, _, name = spec.partition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{spec!r} is neither one of {', '.join(table)} nor path/to/file.py:function")
    return function_of(Path(path), name)


def name_weight(spec: str, form: str, positive: bool = True) -> tuple[str, float | None]:
    """Split `name=weight`; the weight is None if there is no `=`, or if the `=` is part of a path.

    positive: whether weights must be above 0. Raises ValueError with the message `form` if the weight is invalid or the
    name is missing.
    """
    name, equals, weight = spec.rpartition("=")
    if not equals or "/" in weight or ":" in weight or ".py" in weight:
        return spec, None
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(form)
    return name, value
