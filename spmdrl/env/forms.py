"""Loads environments by name: classes, lists of tools and single tools in files and modules, and built-in environments.

An environment is an object with some of these members; a function may be plain or async:

reset(row, seed)             returns messages, the user's text, or None for the row's prompt
step(message)                returns (messages | text | History | None, reward | None, done); a History replaces all
                             messages so far
any other public method      a tool if it has a docstring; its arguments need type hints
tools                        a list of typed functions as tools, instead of methods; may be None or empty until reset
tool_schemas(), call(name, arguments)     OpenAI function schemas and a function that makes calls, instead of methods
                             and `tools`
reward()                     returns a number, {"score": number, name: number}, or None
state(), restore(state)      `state` returns a JSON value; `restore` sets it after a reset with the same row and seed
state_key()                  returns a JSON value that is equal for equal states (GiGPO compares turns in equal states)
close()                      frees the environment's resources
timeout_s                    time limit of each call, in seconds
parallel_calls               if False, a turn's calls run one after another, in order; by default they run in parallel

Plain (not async) functions run in threads, so signals and time limits that use signals do not work in them.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from spmdrl.config.fields import nearest
from spmdrl.config.user_code import error_text, import_file, place
from spmdrl.env import gyms, verl_form
from spmdrl.env.operations import by_name, methods_of, tool_of
from spmdrl.env.trl import FromTRL, Functions, is_trl

BUILTIN = {
    "guess": "spmdrl.env.builtin:Guess",
    "guess_tool": "spmdrl.env.builtin:GuessTool",
    "calculator": "spmdrl.env.calculator:Calculator",
    "python": "spmdrl.env.python_tool:Python",
    "python_session": "spmdrl.env.python_tool:PythonSession",
    "search": "spmdrl.env.search:Search",
    "mcp": "spmdrl.env.mcp_tools:Mcp",
}
"""Built-in environments and tools by name, as `module:Class`. The docstring of each class describes it."""
PARTS = {
    "reset": ("row", "seed"),
    "step": ("message",),
    "call": ("name", "arguments"),
    "restore": ("state",),
    "reward": (),
    "state": (),
    "state_key": (),
    "close": (),
    "tool_schemas": (),
}
"""Environment methods that are not tools, with their parameters."""
RESERVED = (*PARTS, "tools")
LIBRARIES: dict[str, ModuleType] = {"gym": gyms, "verl": verl_form}
"""Modules that wrap environments from other libraries, by `Form.kind`."""


class SettingsError(ValueError):
    """An environment does not accept its settings."""


@dataclass(frozen=True)
class Form:
    """The environment that a name refers to: a function that makes it, its kind, and a description."""

    make: Callable[[dict[str, Any]], Any]
    """(settings) -> an environment. Raises SettingsError if the environment rejects the settings."""
    kind: str
    hello: str
    """A description of the environment for the log."""


def load(name: str) -> Form:
    """Load an environment by name: `file.py:Class`, `package.module:Class`, `builtin:NAME`, `mcp:URL` or `mcp:COMMAND`.

    Instead of a class, the name may refer to a function or a list of functions, which become tools. It may also refer
    to a class written for TRL's `environment_factory` or for a library of gyms.py or verl_form.py, or to a
    `functools.partial` of a class. gyms.py also accepts names such as `gymnasium:ID`, and verl_form.py accepts verl's
    YAML files.

    Raises:
        ValueError: the environment cannot be loaded; the message names the file and the cause.
    """
    for recognise in _OF_NAMES:
        if form := recognise(name):
            return form
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        known = [*(f"builtin:{each}" for each in BUILTIN), *(f"{each}:NAME" for each in gyms.PACKAGES)]
        raise ValueError(
            f"{name!r} names no environment: write file.py:Class, package.module:Class, a YAML file of settings or one "
            f"in verl's form, or one of {', '.join(known)}"
        )
    module = _module(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [k for k, v in vars(module).items() if not k.startswith("_") and _is_own(v, module)]
            raise ValueError(f"{module_name} has no {attribute} (it has: {', '.join(own) or 'none'})")
        found = getattr(found, part)
    for recognise in _OF_OBJECTS:
        if form := recognise(found, name):
            return form
    raise ValueError(
        f"{name} is of the type {type(found).__name__}: name a class, a function that is a tool, or a list of tools"
    )


def _builtin(name: str) -> Form | None:
    kind, _, short = name.partition(":")
    if kind != "builtin":
        return None
    if short not in BUILTIN:
        near = nearest(short, BUILTIN)
        hint = f": did you mean builtin:{near[0]}?" if near else ""
        raise ValueError(f"there is no {name}{hint or '.'} Built-in ones: {', '.join(BUILTIN)}")
    return load(BUILTIN[short])


def _mcp(name: str) -> Form | None:
    if not name.startswith("mcp:"):
        return None
    given, server = mcp_settings(name), load(BUILTIN["mcp"])
    return Form(lambda settings: server.make(given | settings), "mcp", f"tools of the MCP server {name[4:].strip()}")


def mcp_settings(name: str) -> dict[str, Any]:
    """Return the settings of `builtin:mcp` for the name `mcp:URL` or `mcp:COMMAND`."""
    rest = name.partition(":")[2].strip()
    if not rest:
        raise ValueError(f"the environment {name!r} names no MCP server: write mcp:https://... or mcp:COMMAND")
    return {"url" if rest.startswith(("http://", "https://")) else "command": rest}


def _library(found: Any, name: str) -> Form | None:
    """Return the form of a class that was written for another library, or None if no library accepts it.

    found: the class, a `functools.partial` of it, or None for a name that only a library knows, such as `gymnasium:ID`.
    """
    for kind, library in LIBRARIES.items():
        if library.is_mine(found, name):
            target, hello = (name, name) if found is None else (found, f"{kind} environment of {name}")
            return Form(functools.partial(_wrapped, library, target), kind, hello)
    return None


def _wrapped(library: ModuleType, target: Any, settings: dict[str, Any]) -> Any:
    try:
        return library.wrap(target, settings)
    except ValueError as e:
        raise SettingsError(str(e)) from e


def _module(module_name: str) -> ModuleType:
    verl_form.provide()
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ValueError(f"there is no file {module_name} (from {Path.cwd()})")
        return import_file(path, ahead=True)
    try:
        return importlib.import_module(module_name)
    except BaseException as e:  # user code may also raise SystemExit
        raise ValueError(f"importing {module_name} raised {error_text(e)} ({place(e)})") from e


def _is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__ or isinstance(value, list | functools.partial)


# ── objects ──────────────────────────────────────────────────────────────────


def _tools(found: Any, name: str) -> Form | None:
    functions = [found] if isinstance(found, FunctionType) else found
    if not isinstance(functions, list | tuple):
        return None
    if not functions:
        raise ValueError(f"{name} is an empty list: put the functions that are the tools into it")
    names = ", ".join(by_name(map(tool_of, functions), name))
    return Form(lambda settings: _make(Functions, settings, list(functions)), "tools", f"tools {names}")


def _class(found: Any, name: str) -> Form | None:
    kind = found.func if isinstance(found, functools.partial) else found
    if not inspect.isclass(kind):
        return None
    if is_trl(kind):
        return Form(lambda settings: FromTRL(_make(found, settings)), "trl", f"TRL's class {kind.__name__}")
    _check_class(kind, name)
    return Form(lambda settings: _make(found, settings), "class", f"class {kind.__name__}")


def _check_class(kind: type, name: str) -> None:
    """Check that paired methods, such as `state` and `restore`, are both defined, and that methods match `PARTS`."""
    if not hasattr(kind, "reset"):
        raise ValueError(f"{name} has no reset: write def reset(self, row, seed)")
    for one, other in (("state", "restore"), ("restore", "state"), ("tool_schemas", "call"), ("call", "tool_schemas")):
        if hasattr(kind, one) and not hasattr(kind, other):
            raise ValueError(f"{name} has {one} without {other}: write both or neither")
    for member, names in PARTS.items():
        function = inspect.getattr_static(kind, member, None)
        if not isinstance(function, FunctionType):
            continue
        wanted = f"def {member}({', '.join(['self', *names])})"
        try:
            signature = inspect.signature(function)
            # reset is called with keywords, so its parameters may be in any order
            signature.bind(None, **dict.fromkeys(names)) if member == "reset" else signature.bind(None, *names)
        except TypeError as e:
            raise ValueError(f"{member} of {name} is called as {wanted}: {e}") from e


def _make(kind: Callable[..., Any], settings: dict[str, Any], *first: Any) -> Any:
    try:
        inspect.signature(kind).bind(*first, **settings)
    except TypeError as e:
        given = ", ".join(settings) or "none"
        raise SettingsError(f"its settings (given: {given}) do not fit: {e}") from e
    except ValueError:
        pass  # some classes have no signature that Python can inspect
    return kind(*first, **settings)


def functions_of(environment: Any) -> list[Callable[..., Any]]:
    """Return the typed functions that serve as an environment's tools: its attribute `tools`, or its methods."""
    listed = getattr(environment, "tools", None)
    if listed is None:
        return methods_of(environment, RESERVED)
    if not isinstance(listed, list | tuple):
        raise ValueError(
            f"tools is of the type {type(listed).__name__}: make it a list of functions, as self.tools = [look, take]"
        )
    return list(listed)


_OF_NAMES: list[Callable[[str], Form | None]] = [_builtin, _mcp, functools.partial(_library, None)]
_OF_OBJECTS: list[Callable[[Any, str], Form | None]] = [_tools, _library, _class]
