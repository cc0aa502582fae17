"""Reads raw settings from the command line and YAML files, checks them by type, and parses them with tyro."""

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import tyro
import yaml

from spmdrl.config.dump import RESOLVED
from spmdrl.config.fields import ConfigError, flag, is_optional, is_tuple, nearest

COMMAND_LINE = "command line"
TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
MOST_NODES, MOST_LEVELS = 10_000, 8
"""Maximum number of entries in a YAML file, and maximum nesting depth. Entries repeated by an alias count each time."""
RESAMPLE, POWER = "filter.resample", "filter.resample_power"
"""The setting for the resampling method, and the key for its power in files from other versions."""
CONTROLLER, TARGET, DEFAULT_TARGET = "algo.kl_controller", "algo.kl_target", "0.1"
"""The KL controller key in files from other versions, the setting that replaces the key, and that setting's default for
such files."""
RESHARD, GATHER = "policy.reshard_after_forward", "policy.gather"
CHOICES = {RESHARD: (GATHER, "", "once"), "policy.liger": ("policy.liger", "on", "off")}
"""Boolean setting in files from other versions -> (setting that replaces it, value for true, value for false). An empty
value omits the setting."""
MERGED = {
    "policy.recompute": "policy.activation_checkpointing",
    CONTROLLER: TARGET,
    POWER: RESAMPLE,
    RESHARD: GATHER,
}
"""Setting name in other versions -> the setting that replaces it, for hints about unknown names."""

C = TypeVar("C")
E = TypeVar("E")


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """Result of loading a command line and its files: the settings, and where they come from."""

    config: C
    dry_run: bool = False
    """True if the job only prints the resolved config and the plan."""
    given: frozenset[str] = frozenset()
    """Settings given by a flag or a user's file, excluding those from presets and from files written by a run."""
    notes: tuple[str, ...] = ()
    """Lines that tell the user about defaults, and about settings in files that a later preset overrides."""
    without_flags: Callable[[], "Loaded[C] | None"] = lambda: None
    """Function that reloads the files without the flags, or returns None if there are no files."""


@dataclass(frozen=True)
class Given:
    """The text of one setting (None for YAML's null), and where it comes from: `file.yaml:3` or the command line."""

    values: list[str] | None
    origin: str


Entries = list[tuple[str, Given]]
"""(setting name, text) pairs, in the order of a file or command line."""


def read_flags(argv: list[str], problems: list[str]) -> tuple[Entries, list[str]]:
    """Return the flags on a command line, each with the words that follow it, and the `--config` files."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            problems.append(f"unexpected word {word!r}: settings are flags such as --run.steps 5")
    if ("config", []) in found:
        problems.append("--config needs the path of a YAML file")
    files = [path for name, words in found if name == "config" for path in words]
    return [(name, Given(words, COMMAND_LINE)) for name, words in found if name != "config"], files


def read_yaml(path: str, problems: list[str]) -> Entries:
    """Return the entries of a YAML file (dotted names and text), converting some keys from other versions.

    The entries are read from YAML nodes, which have line numbers.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"--config {path}: {error.strerror if isinstance(error, OSError) else error}")
        return []
    except RecursionError:
        problems.append(f"--config {path}: nested too deeply; settings are sections with values in them")
        return []
    found: Entries = []
    try:
        if root is not None:
            _flatten(root, "", path, found, problems, itertools.count())
    except OverflowError as error:
        problems.append(f"--config {path}: {error}")
    found = [entry for name, given in found for entry in _chosen(name, given)]
    controller = dict(found).get(CONTROLLER)
    if controller and controller.values in (["fixed"], ["adaptive"]):
        default = Given([DEFAULT_TARGET], controller.origin)
        return list(with_target(dict(found), controller.values == ["adaptive"], default).items())
    return found


def _chosen(name: str, given: Given) -> Entries:
    """Return a file's entry. A boolean setting of another version (CHOICES) is replaced or omitted."""
    value = (given.values or [""])[0].lower()
    if name not in CHOICES or value not in TRUE | FALSE:
        return [(name, given)]
    other, yes, no = CHOICES[name]
    chosen = yes if value in TRUE else no
    return [(other, replace(given, values=[chosen]))] if chosen else []


def one_resampling(found: Entries) -> Entries:
    """Return the entries from all files and flags, with the power for `pow` merged into `filter.resample`.

    Files from other versions store this exponent under a separate key (`POWER`).
    """
    powers = [given.values or ["2"] for name, given in found if name == POWER and given.origin != COMMAND_LINE]
    if not powers:
        return found
    return [
        (name, replace(given, values=[with_power(given.values[0], powers[-1][0])]))
        if name == RESAMPLE and given.values
        else (name, given)
        for name, given in found
        if name != POWER or given.origin == COMMAND_LINE
    ]


def with_power(method: str, power: object) -> str:
    """Return `pow=p` for the resampling method `pow` with a power p other than 2, or any other method unchanged."""
    return f"pow={power}" if method == "pow" and str(power) not in ("2", "2.0") else method


def with_target(entries: dict[str, E], adaptive: bool, default: E) -> dict[str, E]:
    """Return a file's entries without the key `algo.kl_controller` of other versions, which `algo.kl_target` replaces.

    adaptive: False if the KL coefficient is constant, which means no target. default: target if the file has none.
    """
    rest = {name: value for name, value in entries.items() if name != CONTROLLER}
    if not adaptive:
        rest.pop(TARGET, None)
    elif TARGET not in rest:
        rest[TARGET] = default
    return rest


def is_resolved(path: str) -> bool:
    """Return True for a file written by a run or `--dry-run`, which therefore contains every setting."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\n") == RESOLVED
    except (OSError, UnicodeDecodeError):
        return False


def _flatten(
    node: yaml.Node, prefix: str, path: str, found: Entries, problems: list[str], nodes: Iterator[int]
) -> None:
    origin = f"{path}:{node.start_mark.line + 1}"
    # Limit levels and entries, because an alias can refer to the section that contains it or expand to a huge number of
    # entries.
    if next(nodes) > MOST_NODES or prefix.count(".") > MOST_LEVELS:
        raise OverflowError(f"line {node.start_mark.line + 1}: nested too deeply, or more than {MOST_NODES} entries")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                problems.append(f"{path}:{line}: a key must be a name")
                continue
            name = key.value.replace("-", "_")
            if name in seen:
                problems.append(f"{path}:{line}: {prefix}{name} is given twice (also on line {seen[name]})")
            seen[name] = line
            _flatten(value, f"{prefix}{name}.", path, found, problems, nodes)
    elif not prefix:
        problems.append(f"{origin}: expected sections with settings, such as `run:` and under it `steps: 5`")
    elif isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            found.append((prefix[:-1], Given([item.value for item in node.value], origin)))
        else:
            problems.append(f"{origin}: {prefix[:-1]} must be a list of plain values")
    else:
        is_null = node.tag == "tag:yaml.org,2002:null"
        found.append((prefix[:-1], Given(None if is_null else [node.value], origin)))


def unknown_name(name: str, given: Given, valid: list[str]) -> str:
    """Return a line about an unknown name, with a hint that names the setting that the user probably meant."""
    inside = [leaf for leaf in valid if leaf.startswith(name + ".")]
    in_file = given.origin != COMMAND_LINE
    if inside:
        shown = ", ".join(inside if in_file else map(flag, inside))
        text = f"{name if in_file else flag(name)} is a section, not a setting; it holds {shown}"
    else:
        near = nearest(MERGED.get(name, name), valid, 3) or nearest(name.replace(".no_", "."), valid, 1)
        # For a name without its section, show all sections with a setting of this name.
        near = [leaf for leaf in near if leaf.endswith("." + name)] or near[:1]
        kind = f"unknown key {name}" if in_file else f"unknown flag {flag(name)}"
        meant = " or ".join(near if in_file else map(flag, near))
        hint = f"did you mean {meant}?" if near else "see --help for all settings"
        text = f"{kind}; {hint}"
    return f"{given.origin}: {text}" if in_file else text


def tokens_of(name: str, hint: Any, given: Given) -> list[str]:
    """Return a setting's words for tyro. Raises ConfigError if the text does not match the setting's type."""
    where = flag(name) if given.origin == COMMAND_LINE else f"{given.origin}: {flag(name)}"
    values = given.values
    if values is None:
        if not is_optional(hint):
            raise ConfigError(f"{where}: null is not a valid value" + ("; write '' for empty" if hint is str else ""))
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
    # Join flag and value with `=`, because the value might start with a dash.
    return [f"{flag(name)}={values[0]}"]


def parse(command: type, tokens: list[str], prog: str, origins: dict[str, str]) -> Any:
    """Parse words with tyro. Raises ConfigError with tyro's error message on one line, without its frame.

    origins: setting -> where its value comes from, for the message.
    """
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            # Otherwise tyro searches the source files of all sections for comments, which is slow.
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
