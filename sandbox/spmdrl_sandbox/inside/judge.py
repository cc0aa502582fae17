"""Runs tests on functions of another program, which it reaches through its caller alone, by lines of JSON.

In:  {"tests": [source, ...], "prelude": source, "entry": name, "names": [name, ...]}     first line
     {"value": v} or {"error": [type, text]}     answers to its calls
Out: {"call": name, "args": [...], "kwargs": {...}}
     {"done": [null or text, ...]}     for each test, why it failed

The tests and the program that is tested share no process: it sees the arguments of calls, never the tests. Values go
by values.py. Standard library only.
"""

import ast
import builtins
import json
import os
import sys
from typing import Any

from spmdrl_sandbox.inside.values import NotPlainError, decode, encode


class RowError(Exception):
    """A test is at fault, and not the program. No program can raise it here."""


class Candidate:
    """A function of the program."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and raise what it raises.

        Raises:
            RowError: an argument is no plain data.
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
        # One that ends a loop would end the test's own.
        silent = (StopIteration, StopAsyncIteration)
        if not (isinstance(known, type) and issubclass(known, Exception)) or issubclass(known, silent):
            known = RuntimeError
        raised = known(text)
        raised.of_program = True  # type: ignore[attr-defined]
        raise raised


def free_names(source: str) -> set[str]:
    """Return the names that tests read and neither bind nor find among Python's own."""
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
    """Run one test; returns why it failed, or None. names: functions of the program that it may call."""
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
    """Tell whether an error is that of a test which imports what is not there, or does not import a module it uses."""
    return isinstance(error, ImportError) or (
        isinstance(error, NameError) and getattr(error, "name", None) in sys.stdlib_module_names
    )


def _say(message: dict) -> None:
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(_OUT, data) :]


if __name__ == "__main__":
    _OUT = os.dup(1)
    # Prints of tests stand among the errors.
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    known = set(task["names"])
    _say({"done": [failure(test, task["prelude"], task["entry"], known) for test in task["tests"]]})
