"""Tables of docs/settings.md, from the declarations of the settings' fields."""

import re
from typing import Any, Literal, get_args, get_origin

from doctables.text import table

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.losses import LOSSES
from spmdrl.config.declare import declared
from spmdrl.config.fields import flag, get, is_optional, is_tuple, leaves, shown
from spmdrl.config.parameters import read_by
from spmdrl.config.use import changed, in_words, is_read, leaves_of_functions, single_changes, ways, would_read
from spmdrl.session.job import jobs


def all_settings() -> str:
    """Return a table for each section of the settings, over all commands."""
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for module, job in jobs().items():
        for name in leaves(job.settings):
            row = (name, *declarations(job.settings, name))
            rows.setdefault(name.rpartition(".")[0], {}).setdefault(row, []).append(module.removeprefix("spmdrl."))
    parts = []
    for group in sorted(rows):
        commands = list(dict.fromkeys(command for found in rows[group].values() for command in found))
        # If a setting differs between commands, its rows follow each other.
        order = list(dict.fromkeys(row[0] for row in rows[group]))
        found = [
            [f"`{flag(name)}`", *cells, "" if len(found) == len(commands) else ", ".join(found)]
            for (name, *cells), found in sorted(rows[group].items(), key=lambda row: order.index(row[0][0]))
        ]
        head = ["setting", "default", "values", "read with", "resume", "only in"]
        parts.append(f"## {group or 'without a section'}\n\nIn {', '.join(commands)}.\n\n{table(head, *found)}")
    return "\n\n".join(parts)


def declarations(schema: type, name: str) -> tuple[str, str, str, str]:
    """Return default, valid values, conditions and resume of a setting, as cells of a table.

    schema: settings of a command. name: dotted name of the setting. The last cell is `free` if a resume may change it.
    """
    config, hint, declares = schema(), leaves(schema)[name], declared(schema)[name]
    value = get(config, name)
    rule = re.sub("^must (be|lie) ", "", declares.rule.says) if declares.rule else ""
    default = "" if value in ("", ()) else f"`{shown(value)}`".replace("|", "\\|")
    return default, ", ".join(filter(None, [kind(hint), rule])), conditions(config, name), "free" * bool(declares.free)


def kind(hint: Any) -> str:
    """Return the values of a type in words, such as "`auto` or `on`", "number" or "text"."""
    if get_origin(hint) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint))
    if is_optional(hint):
        return f"{' or '.join(kind(each) for each in get_args(hint) if each is not type(None))} or None"
    if is_tuple(hint):
        return "words" if str in get_args(hint) else "numbers"
    return {str: "text", int: "integer", float: "number", bool: "yes or no"}[hint]


def conditions(config: Any, name: str) -> str:
    """Return the values of other settings with which a run uses a setting.

    If a run with default settings uses it, return "not" and the values with which a run does not use it.
    """
    if name in leaves_of_functions(type(config)):
        tables = {"algo.loss": LOSSES, "algo.advantage": ADVANTAGES}
        readers = {of: [each for each, row in rows.items() if name in read_by(row)] for of, rows in tables.items()}
        return " or ".join(f"`{flag(of)}` {', '.join(found)}" for of, found in readers.items() if found)
    if declared(type(config))[name].only_with is None:
        return ""
    if not would_read(config, name):
        return "; ".join(f"`{each}`" for each in ways(config, name)).replace("|", "\\|")
    stopping: dict[str, list[Any]] = {}
    for other, value in [*turned_off(config), *single_changes(config)]:
        if other != name and stops(config, other, value, name):
            stopping.setdefault(other, []).append(value)
    found = "; ".join(f"`{in_words(*change)}`" for change in stopping.items()).replace("|", "\\|")
    return f"not {found}" if found else ""


def turned_off(config: Any) -> list[tuple[str, Any]]:
    """Return (name, value) for each setting that can be turned off with an empty text or 0."""
    off: dict[Any, Any] = {str: "", int: 0, float: 0.0}
    hints = {name: hint for name, hint in leaves(type(config)).items() if hint in off}
    return [(name, off[hint]) for name, hint in hints.items() if get(config, name) != off[hint]]


def stops(config: Any, other: str, value: Any, name: str) -> bool:
    """Return whether a run does not use the setting `name` if `other` has this value; False for invalid settings."""
    try:
        return not is_read(changed(config, other, value), name)
    except (ValueError, KeyError):
        return False
