"""Reads verl's YAML files of tools and interactions, and provides stand-ins for its modules if verl is not installed.

    tools:
      - class_name: my_tools.Lookup          # imported from the working directory or from the folder of this file
        config: {type: native, ...}
        tool_schema: {type: function, function: {name: lookup, ...}}
    interaction:
      - name: teacher
        class_name: my_users.Teacher
        config: {}

As in verl, the two lists may be in two files: the setting `interaction_config_path` names the interactions file.
`verl_env.py` describes how these environments behave.
"""

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from spmdrl.config.user_code import error_text
from spmdrl.env.verl_env import AgentData, Parts, VerlInteraction, VerlTools, schema_of

SUFFIXES = (".yaml", ".yml")
SETTINGS = ("interaction_config_path", "count_rewards")
METHODS = {"tools": ("create", "execute", "calc_reward", "release"), "interaction": ("generate_response",)}
"""Methods that the classes in each list of the YAML file must have, by the list's key."""


def is_verl_yaml(path: str) -> bool:
    """Return whether a file is a YAML file of verl's tools or interactions."""
    file = Path(path).expanduser()
    if file.suffix not in SUFFIXES or not file.is_file():
        return False
    try:
        return _has_lists(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return False


def is_mine(target: object, name: str) -> bool:
    """Return whether `target` is a class with verl's methods or, if it is None, `name` is a YAML file of verl."""
    if target is None:
        return is_verl_yaml(name)
    return isinstance(target, type) and _kind(target) != ""


def wrap(target: object, settings: dict[str, Any]) -> VerlTools:
    """Make an environment from the path of a YAML file, or from a class like verl's BaseTool or BaseInteraction.

    settings: as in `load_yaml`. For a class, they can also have `config` and, if it defines no schema, `tool_schema`.

    Raises:
        ValueError: the file or the class cannot be used.
    """
    if isinstance(target, str):
        return load_yaml(target)(settings)
    assert isinstance(target, type)
    entry = {key: settings[key] for key in ("config", "tool_schema") if key in settings}
    parts = Parts()
    _add(parts, _kind(target), target, entry, target.__name__)
    return _environment(parts, target.__name__, {key: settings[key] for key in settings.keys() - entry})


def load_yaml(path: str) -> Callable[[dict[str, Any]], VerlTools]:
    """Return a function that takes settings and makes environments from a YAML file.

    The setting `interaction_config_path` names a second YAML file, relative to the working directory or to the folder
    of the first file. The setting `count_rewards` (default true) controls whether tool rewards and interaction scores
    count as rewards.

    Raises:
        ValueError: the file, a class or a schema cannot be used.
    """
    return partial(_environment, _read(str(Path(path).expanduser().resolve())), path)


def _environment(parts: Parts, of: str, settings: dict[str, Any]) -> VerlTools:
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise ValueError(
            f"{of}: environments of verl have no setting {unknown[0]!r}; their settings: {', '.join(SETTINGS)}"
        )
    counts = settings.get("count_rewards", True)
    if not isinstance(counts, bool):
        raise ValueError(f"{of}: the setting count_rewards must be true or false, not {counts!r}")
    if second := settings.get("interaction_config_path"):
        file = Path(second).expanduser()
        file = file if file.is_file() else Path(of).expanduser().resolve().parent / second
        parts = Parts(parts.tools, parts.interactions | _read(str(file.resolve())).interactions)
    return VerlInteraction(parts, counts) if parts.interactions else VerlTools(parts, counts)


@lru_cache(maxsize=32)
def _read(path: str) -> Parts:
    """Read a YAML file and make its tools and interactions, once per process."""
    provide()
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {path} ({e})") from e
    except (yaml.YAMLError, RecursionError) as e:
        raise ValueError(f"{path} is not valid YAML ({' '.join(str(e).split())})") from e
    if not _has_lists(found):
        raise ValueError(f"{path}: a YAML file of verl must have a list `tools` or a list `interaction`")
    if "${" in text:
        found = _resolved(path, found)
    # Classes are imported from the working directory, as in verl, or from the folder of the file.
    sys.path += [each for each in (str(Path.cwd()), str(Path(path).parent)) if each not in sys.path]
    parts = Parts()
    for key in METHODS:
        for number, entry in enumerate(found.get(key) or ()):
            where = f"{path}: {key}[{number}]"
            if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str) or not entry["class_name"]:
                raise ValueError(f"{where} has no class_name: give it as package.module.Class")
            config = entry.get("config") or {}
            if not isinstance(config, dict):
                raise ValueError(f"{where}: config must be a mapping, not {config!r}")
            if key == "tools" and config.get("type", "native") != "native":
                raise ValueError(
                    f"{where}: only tools with config.type native are read from verl's YAML, but this type is "
                    f"{config['type']!r}; use an MCP server as a separate environment"
                )
            _add(parts, key, _class(entry["class_name"], where), entry, where)
    return parts


def _has_lists(found: Any) -> bool:
    return isinstance(found, dict) and any(isinstance(found.get(key), list) for key in METHODS)


def _resolved(path: str, found: dict) -> dict:
    """Return the settings with OmegaConf's `${...}` replaced by their values, as in verl."""
    try:
        from omegaconf import OmegaConf  # type: ignore[import-not-found]
    except ImportError as e:
        raise ValueError(f"{path} has values like ${{...}}: pip install omegaconf, or write out the values") from e
    try:
        filled: Any = OmegaConf.to_container(OmegaConf.create(found), resolve=True)
    except Exception as e:  # OmegaConf raises errors of many types
        raise ValueError(f"{path}: a value like ${{...}} cannot be filled in ({e})") from e
    return filled


def _class(name: str, where: str) -> type:
    module, _, last = name.rpartition(".")
    if not module:
        raise ValueError(f"{where}: class_name {name!r} has no module: give it as package.module.Class")
    try:
        kind = getattr(importlib.import_module(module), last, None)
    except Exception as e:  # the user's file may raise anything
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] == "verl"
        more = f"; verl is not installed, and only these modules of it exist: {', '.join(modules())}" if missing else ""
        raise ValueError(f"{where}: cannot import {module} ({error_text(e)}){more}") from e
    if not isinstance(kind, type):
        raise ValueError(f"{where}: the module {module} has no class {last}: change class_name")
    return kind


def _kind(target: type) -> str:
    """Return the key of `METHODS` whose methods a class has, or "" if there is none."""
    return next((key for key, names in METHODS.items() if all(callable(getattr(target, n, None)) for n in names)), "")


def _add(parts: Parts, key: str, kind: type, entry: dict, where: str) -> None:
    """Create a tool or an interaction as in verl, from its config and its schema or name, and add it to `parts`.

    key: the list in the file, `tools` or `interaction`. entry: an item of that list. where: the item's location, for
    error messages.
    """
    what = {"tools": "tool", "interaction": "interaction"}[key]
    if lacking := [name for name in METHODS[key] if not callable(getattr(kind, name, None))]:
        raise ValueError(f"{where}: {kind.__name__} is not a class of {what}s, as it has no {lacking[0]}")
    config, schema = dict(entry.get("config") or {}), entry.get("tool_schema")
    if key == "tools" and schema is not None:
        if not isinstance(schema, dict) or not isinstance(schema.get("function"), dict):
            raise ValueError(f"{where}: tool_schema has no `function` with a name, a description and parameters")
        if not isinstance(schema["function"].get("name"), str) or not schema["function"]["name"]:
            raise ValueError(f"{where}: tool_schema.function has no name, which the model needs to call the tool")
    try:
        if key == "tools":
            provide()
            schemas = importlib.import_module("verl.tools.schemas")
            model = None if schema is None else schemas.OpenAIFunctionToolSchema.model_validate(schema)
            part = kind(config=config, tool_schema=model)
            name = schema_of(part)["function"]["name"]
        else:
            name = entry.get("name") or (kind.__name__.removesuffix("Interaction") or kind.__name__).lower()
            part = kind(config={**config, "name": name})
    except Exception as e:  # pydantic and user code may raise anything
        raise ValueError(f"{where}: {kind.__name__} cannot be made ({error_text(e)})") from e
    table = parts.tools if key == "tools" else parts.interactions
    if name in table:
        raise ValueError(f"{where}: two {what}s are named {name!r}: rename one")
    table[name] = part


# ── modules that files import under verl's names ─────────────────────────────


def modules() -> dict[str, dict[str, Any]]:
    """Return the stand-ins that files import if verl is not installed, as a dict: module -> name -> object.

    Raises:
        ValueError: pydantic is not installed.
    """
    try:
        from spmdrl.env import verl_stand_ins
    except ImportError as e:
        raise ValueError("tools in verl's form need the package pydantic: pip install pydantic") from e
    found = {
        name: {each: getattr(verl_stand_ins, each) for each in names} for name, names in verl_stand_ins.MODULES.items()
    }
    return found | {"verl.experimental.agent_loop.tool_agent_loop": {"AgentData": AgentData}}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `modules()` if verl is not installed, as the last finder in `sys.meta_path`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "verl":
            return None
        if "." in fullname and getattr(sys.modules["verl"].__spec__, "loader", None) is not self:
            return None  # verl is installed, so the real modules are imported
        known = any(f"{name}.".startswith(f"{fullname}.") for name in modules())
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(modules().get(module.__name__, {}))


_FINDER = _Finder()


def provide() -> None:
    """Let files import the modules of `modules()` if verl is not installed. May be called several times."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
