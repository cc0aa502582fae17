"""Text given for settings, and where: the words of the command line and the entries of YAML files."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import yaml

from spmdrl.config.dump import RESOLVED

COMMAND_LINE = "command line"
TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
METHOD, POWER = "filter.resample", "filter.resample_power"
"""A setting, and a name of files of other versions that belongs to it."""
MOST_NODES, MOST_LEVELS = 10_000, 8
"""Most entries and levels of a file of settings, aliases followed."""
CONTROLLER, TARGET, AIM = "algo.kl_controller", "algo.kl_target", "0.1"
"""A name that files of other versions have, the setting that says the same, and the value where they lack it."""

E = TypeVar("E")


@dataclass
class Given:
    """The text given for one setting, and where: `file.yaml:3` or the command line. `values` None is YAML's null."""

    values: list[str] | None
    origin: str


Entries = list[tuple[str, Given]]
"""Names of settings with the text given for them, in the order of a file or of the command line."""


def read_flags(argv: list[str], problems: list[str]) -> tuple[Entries, list[str]]:
    """Flags with the words that follow them, and apart from them the `--config` files."""
    found: Entries = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), Given([value] if equals else [], COMMAND_LINE)))
        elif found:
            values = found[-1][1].values
            assert values is not None
            values.append(word)
        else:
            problems.append(f"unexpected word {word!r}: settings are flags such as --run.steps 5")
    files = []
    for name, given in found:
        if name == "config":
            if not given.values:
                problems.append("--config needs the path of a YAML file")
            files += given.values or []
    return [(name, given) for name, given in found if name != "config"], files


def read_yaml(path: str, problems: list[str]) -> Entries:
    """Dotted names and raw text of a YAML file. Composed and not constructed, to keep the text and the line numbers."""
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
    if root is not None:
        try:
            _flatten(root, "", path, found, problems, itertools.count())
        except OverflowError as error:
            problems.append(f"--config {path}: {error}")
    controller = next((given.values for name, given in found if name == CONTROLLER), None)
    if controller in (["fixed"], ["adaptive"]):
        where = next(given.origin for name, given in found if name == CONTROLLER)
        found = list(with_target(dict(found), controller == ["adaptive"], Given([AIM], where)).items())
    return found


def one_resampling(found: Entries) -> Entries:
    """Entries of all files and flags, of which files name the power of resampling apart, by `filter.resample` alone."""
    power = next((g.values or ["2"] for name, g in found[::-1] if name == POWER and g.origin != COMMAND_LINE), None)
    if power is None:
        return found
    rest = [(name, given) for name, given in found if name != POWER or given.origin == COMMAND_LINE]
    return [
        (
            name,
            Given([with_power(given.values[0], power[0])], given.origin) if name == METHOD and given.values else given,
        )
        for name, given in rest
    ]


def with_power(method: str, power: object) -> str:
    """Return the method of resampling with the power that files of other versions name apart."""
    return f"pow={power}" if method == "pow" and str(power) not in ("2", "2.0") else method


def with_target(entries: dict[str, E], adaptive: bool, default: E) -> dict[str, E]:
    """Entries of a file that names a controller of the KL coefficient, in terms of its target alone."""
    rest = {name: value for name, value in entries.items() if name != CONTROLLER}
    if not adaptive:
        rest.pop(TARGET, None)
    elif TARGET not in rest:
        rest[TARGET] = default
    return rest


def is_resolved(path: str) -> bool:
    """Tells whether a run or `--dry-run` wrote this file, which then names every setting."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\n") == RESOLVED
    except (OSError, UnicodeDecodeError):
        return False


def _flatten(
    node: yaml.Node,
    prefix: str,
    path: str,
    found: Entries,
    problems: list[str],
    nodes: Iterator[int],
) -> None:
    origin = f"{path}:{node.start_mark.line + 1}"
    # Aliases may refer to a section that they stand in, or multiply.
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
                problems.append(f"{path}:{line}: {prefix}{name} stands twice (also on line {seen[name]})")
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
