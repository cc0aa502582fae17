"""A program that keeps its state and answers calls by lines of JSON.

It reads from stdin:
    {"run": source}                                   executes statements; prints the value of a final expression
    {"load": source}                                  executes a module; the value is the list of its functions' names
    {"call": name, "args": [...], "kwargs": {...}}    calls a function, or the method `name` of a class `Solution`
It writes to stdout for each line:
    {"value": v} or {"error": [type, text]}, with "printed": text if the code printed something

Values are encoded by values.py. The untrusted code can also write to the pipe of answers, so answers are only as
trustworthy as this code. The program needs only the standard library.
"""

import ast
import io
import json
import os
import sys
import traceback
import types
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from spmdrl_sandbox.inside.values import decode, encode


def found(space: dict[str, Any], name: str) -> Any:
    """Return the function `name` of `space`, or the method `name` of a class `Solution` in it."""
    if name in space:
        return space[name]
    if "Solution" in space and hasattr(space["Solution"], name):
        return getattr(space["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def names(space: dict[str, Any]) -> list[str]:
    """Return the sorted names of the callables in `space` and of the attributes of a class `Solution`."""
    functions = {name for name, x in space.items() if callable(x)}
    return sorted(functions | set(dir(space.get("Solution"))) - set(dir(None)))


def run(space: dict[str, Any], source: str) -> None:
    """Execute statements like a notebook cell. If the last statement is an expression, print its value."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "<cell>", "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        if value is not None:
            print(repr(value))


def load(space: dict[str, Any], source: str) -> None:
    """Execute source as a module named `program`, not `__main__`, and copy the module's names to `space`."""
    module = sys.modules["program"] = types.ModuleType("program")
    vars(module).update({name: x for name, x in space.items() if not name.startswith("__")})
    exec(compile(source, "program.py", "exec"), vars(module))
    space.update({name: x for name, x in vars(module).items() if not name.startswith("__")})


def answer(space: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Carry out a message and return its answer, which holds the exception if one was raised."""
    try:
        if "run" in message:
            run(space, message["run"])
            return {"value": None}
        if "load" in message:
            load(space, message["load"])
            return {"value": names(space)}
        args = [decode(x) for x in message["args"]]
        kwargs = {name: decode(x) for name, x in message.get("kwargs", {}).items()}
        return {"value": encode(found(space, message["call"])(*args, **kwargs))}
    except SystemExit as ended:
        return {"error": ["SystemExit", str(ended.code)]}
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return {"error": [type(error).__name__, str(error)], "trace": "".join(lines)[-4000:]}


def main() -> None:
    """Answer the messages on stdin until it ends."""
    answers, messages = os.dup(1), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    space: dict[str, Any] = {"__name__": "__main__"}
    for line in messages:
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            out = answer(space, json.loads(line))
        if text := printed.getvalue():
            out["printed"] = text
        try:
            data = (json.dumps(out) + "\n").encode()
        except (ValueError, RecursionError) as error:
            # The answer has an integer with more digits than Python converts, or too deeply nested lists.
            data = (json.dumps({"error": [type(error).__name__, str(error)]}) + "\n").encode()
        while data:
            data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
