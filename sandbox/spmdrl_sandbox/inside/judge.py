"""Runs tests on functions of another program. The calls are lines of JSON, which the caller forwards.

It reads from stdin:
     {"tests": [source, ...], "prelude": source, "entry": name, "names": [name, ...]}     first line
     {"value": v} or {"error": [type, text]}                                              the answer to a call
It writes to stdout:
     {"call": name, "args": [...], "kwargs": {...}}                                       a call
     {"done": [null or text, ...]}                                                        at the end; text: the failure

The tests and the tested program run in different processes. The program sees the arguments of calls but not the tests.
Values are encoded by values.py. The module needs only the standard library.
"""

import ast
import builtins
import json
import os
import sys
from typing import Any

from spmdrl_sandbox.inside.values import NotPlainError, decode, encode


class RowError(Exception):
    """An error in a test, not in the program. Programs cannot raise this error in the test process."""


class Candidate:
    """A stand-in for a function of the tested program."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program's function and return its value.

        If the function raised an exception, raise a built-in one of the same name, or else a RuntimeError.

        Raises:
            RowError: an argument is not plain data.
        """
        try:
            given, named = [encode(x) for x in args], {k: encode(v) for k, v in kwargs.items()}
        except NotPlainError as error:
            raise RowError(f"a test passes {error}") from None
        _say({"call": self.name, "args": given, "kwargs": named})
        answer = json.loads(sys.stdin.readline())
        if "error" not in answer:
            return decode(answer["value"])
        kind, text = answer["error"]
        known = getattr(builtins, kind, RuntimeError)
        # A StopIteration of the program would silently end a loop of the test, so it becomes a RuntimeError.
        silent = (StopIteration, StopAsyncIteration)
        if not (isinstance(known, type) and issubclass(known, Exception)) or issubclass(known, silent):
            known = RuntimeError
        raised = known(text)
        raised.of_program = True  # type: ignore[attr-defined]
        raise raised


def free_names(source: str) -> set[str]:
    """Return the names that tests read but do not define, except for Python's builtins."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def failure(source: str, prelude: str, entry: str, names: set[str]) -> str | None:
    """Run one test and return the reason why it failed, or None. names: the program's functions."""
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        used = (free_names(prelude + "\n" + source) & names) | {entry}
        space |= {name: Candidate(name) for name in used if name}
        exec(compile(prelude, "<prelude>", "exec"), space)
        exec(compile(source, "<test>", "exec"), space)
        if callable(space.get("check")) and entry:
            space["check"](Candidate(entry))
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        if lacks_import(error) and not hasattr(error, "of_program"):
            kind, text = RowError.__name__, f"a test cannot run ({kind}: {text})"
        return f"{kind}: {text}"[:500]
    return None


def lacks_import(error: BaseException) -> bool:
    """Return whether an error shows that a test imports a missing module, or uses a module without importing it."""
    return isinstance(error, ImportError) or (
        isinstance(error, NameError) and getattr(error, "name", None) in sys.stdlib_module_names
    )


def _say(message: dict) -> None:
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(_OUT, data) :]


if __name__ == "__main__":
    _OUT = os.dup(1)
    # Redirect prints of tests to stderr.
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    known = set(task["names"])
    _say({"done": [failure(test, task["prelude"], task["entry"], known) for test in task["tests"]]})
