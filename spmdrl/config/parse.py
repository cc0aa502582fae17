"""Checks the text given for each setting against its type, and has tyro parse it."""

import contextlib
import io
import re
from typing import Any, Literal, get_args, get_origin

import tyro

from spmdrl.config.fields import ConfigError, flag, is_optional, is_tuple, nearest
from spmdrl.config.given import COMMAND_LINE, FALSE, TRUE, Given

MERGED = {
    "policy.recompute": "policy.activation_checkpointing",
    "algo.kl_controller": "algo.kl_target",
    "filter.resample_power": "filter.resample",
}
"""Name in files and commands of other versions -> the setting that says the same."""


def unknown_name(name: str, given: Given, valid: list[str]) -> str:
    """One line for a name that is not a setting, with the one that was probably meant."""
    inside = [leaf for leaf in valid if leaf.startswith(name + ".")]
    in_file = given.origin != COMMAND_LINE
    if inside:
        shown = ", ".join(inside if in_file else map(flag, inside))
        text = f"{name if in_file else flag(name)} is a section, not a setting; it holds {shown}"
    else:
        near = nearest(MERGED.get(name, name), valid, 3) or nearest(name.replace(".no_", "."), valid, 1)
        # A name without its section may stand in several.
        near = [leaf for leaf in near if leaf.endswith("." + name)] or near[:1]
        kind = f"unknown key {name}" if in_file else f"unknown flag {flag(name)}"
        meant = " or ".join(near if in_file else map(flag, near))
        hint = f"did you mean {meant}?" if near else "see --help for all settings"
        text = f"{kind}; {hint}"
    return f"{given.origin}: {text}" if in_file else text


def tokens_of(name: str, hint: Any, given: Given) -> list[str]:
    """The words tyro gets for one setting."""
    where = flag(name) if given.origin == COMMAND_LINE else f"{given.origin}: {flag(name)}"
    values = given.values
    if values is None:
        if not is_optional(hint):
            raise ConfigError(f"{where}: null is no value here" + ("; write '' for empty" if hint is str else ""))
        values = ["None"]
    if hint is bool:
        word = " ".join(values).lower() or "true"
        if word not in TRUE | FALSE:
            raise ConfigError(f"{where}: takes true or false, not {' '.join(values)!r}")
        section, _, last = name.rpartition(".")
        return [flag(name)] if word in TRUE else [flag(f"{section}.no_{last}" if section else f"no_{last}")]
    if is_tuple(hint):
        kinds = get_args(hint)
        if Ellipsis not in kinds and len(values) != len(kinds):
            raise ConfigError(f"{where}: takes {len(kinds)} values, got {len(values)}: {' '.join(values)}".rstrip(": "))
        return [flag(name), *values]
    if len(values) != 1:
        one = f"one of {', '.join(map(repr, get_args(hint)))}" if get_origin(hint) is Literal else "one value"
        got = f"{len(values)} values ({' '.join(values)})" if values else "no value"
        raise ConfigError(f"{where}: takes {one}, got {got}")
    if is_optional(hint) and values[0].lower() in {"none", "null", "~", ""}:
        values = ["None"]
    # With `=`, a value may begin with a dash.
    return [f"{flag(name)}={values[0]}"]


def parse(command: type, tokens: list[str], prog: str, origins: dict[str, str]) -> Any:
    """Parse by tyro, its boxed report on stderr turned into one ConfigError line."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            # Comments are not help; without this tyro reads every source file of the sections at each call.
            return tyro.cli(command, args=tokens, prog=prog, config=(tyro.conf.HelptextFromCommentsOff,))
    except SystemExit:
        text = re.sub(r"\x1b\[[0-9;]*m", "", report.getvalue())
    rows = []
    for line in text.splitlines():
        if line.startswith(("╭", "╰")):
            continue
        inner = line.strip("│ ")
        if inner and not inner.strip("─"):
            break
        rows.append(inner)
    message = " ".join(rows).replace("Error parsing ", "").replace("Expected 1 values.", "Expected one value.")
    named = re.search(r"--[\w.-]+", message)
    origin = origins.get(named[0][2:].replace("-", "_")) if named else None
    raise ConfigError(message if origin in (None, COMMAND_LINE) else f"{origin}: {message}")
