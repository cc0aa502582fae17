"""A setting that names one of several things, or a function in a file of the user's."""

import ast
from collections.abc import Collection
from pathlib import Path

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
