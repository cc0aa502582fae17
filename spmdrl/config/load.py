"""Files and flags become one Config.

YAML is flattened to flags and goes through the same tyro parse as the command line, so a key that is wrong in a file is
wrong in the same way as a flag. The type of a field, never YAML's guess, says how its text is read: `lr: 1e-5` is a
float (YAML 1.1 calls it a string) and `enabled: off` is the word `off` (YAML 1.1 calls it false).

Order: the preset, files in the order given, then flags. Later wins, so a flag beats every file wherever it stands.
"""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args

import tyro
import yaml

from spmdrl.config import checks
from spmdrl.config.dump import RESOLVED, redact_text
from spmdrl.config.fields import ConfigError, flag, get, is_optional, is_tuple, leaves, nearest
from spmdrl.config.presets import OF_ADVANTAGE, OF_LOSS, PRESETS, settings_of_preset
from spmdrl.config.schema import Config

C = TypeVar("C")
TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
NEGATED = dict.fromkeys(TRUE, "false") | dict.fromkeys(FALSE, "true")
COMMAND_LINE = "command line"
ALIASES = {"deterministic": "run.deterministic", "no_deterministic": "run.no_deterministic"}
"""Shorter names of settings."""
MOST_NODES, MOST_LEVELS = 10_000, 8
"""Of a file of settings, aliases followed."""
RANK_0_SPEAKS = 20.0
"""Seconds that the others give it; torchrun ends them as soon as it has left."""


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """What the command line asked for."""

    config: C
    dry_run: bool = False
    """Print the resolved config and the plan, and stop."""
    files: tuple[str, ...] = ()
    """The `--config` files, in the order they were read."""
    given: frozenset[str] = frozenset()
    """Settings that a flag or a file written by hand named; not those of a preset or of a run folder's config.yaml."""


@dataclass
class Given:
    """The text given for one setting, and where: `file.yaml:3` or the command line. `values` None is YAML's null."""

    values: list[str] | None
    origin: str


# The settings that belong to the command line and not to a run.
_FILES = Annotated[tuple[str, ...], tyro.conf.arg(help="YAML file with settings; may be given again, later wins.")]
_DRY_RUN = Annotated[bool, tyro.conf.arg(help="Print the resolved config and the plan, and stop.")]
_EXTRA = [
    ("config", _FILES, dataclasses.field(default=())),
    ("dry_run", _DRY_RUN, dataclasses.field(default=False)),
]


def from_command_line(
    argv: Sequence[str] | None = None, prog: str = "python -m spmdrl.train", schema: type[C] = Config
) -> Loaded[C]:
    """Read `--config` files and dotted flags (`--run.steps 5`, `_` or `-` in names) into a schema.

    Args:
        argv: words after the program name; None takes sys.argv.
        prog: name shown by `--help`.
        schema: a dataclass of dataclasses; an entry point with settings of its own may derive one from Config.

    Raises:
        ConfigError: unknown names (all of them together), a value of the wrong type, or a file that cannot be read.
        SystemExit: with code 0 after `--help` (printed on rank 0).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    command = dataclasses.make_dataclass(schema.__name__, _EXTRA, bases=(schema,))
    command.__doc__ = schema.__doc__
    if "--help" in argv or "-h" in argv:
        tyro.cli(command, args=["--help"], prog=prog, console_outputs=_rank() == 0)

    problems: list[str] = []
    from_flags, files = _read_flags(argv, problems)
    from_files: list[tuple[str, Given]] = []
    by_hand, resolved = {COMMAND_LINE}, []
    for path in files:
        found = _read_yaml(path, problems)
        from_files += found
        if _is_resolved(path):
            resolved.append(found)
        else:
            by_hand |= {given.origin for _, given in found}
    for found in resolved:
        implied = _implied_by_preset(found, from_files + from_flags, schema)
        from_files = [entry for entry in from_files if not any(entry is other for other in implied)]

    hints = leaves(schema) | {"dry_run": bool}
    tokens: dict[str, list[str]] = {}
    origins: dict[str, str] = {}
    named: set[str] = set()
    asked = [(ALIASES.get(name, name), given) for name, given in from_files + from_flags]
    for name, given in _preset_layer(asked, schema, problems) + _implied_layer(asked, schema) + asked:
        positive = re.sub(r"(^|\.)no_([a-z_0-9]+)$", r"\1\2", name)
        if name not in hints and hints.get(positive) is bool and given.origin == COMMAND_LINE:
            name, given = positive, Given([NEGATED.get(word, word) for word in given.values or ["true"]], given.origin)
        if given.values is None and any(leaf.startswith(name + ".") for leaf in hints):
            continue  # a section with nothing under it
        if name not in hints or (name == "dry_run" and given.origin != COMMAND_LINE):
            problems.append(_unknown(name, given, [leaf for leaf in hints if leaf != "dry_run"]))
            continue
        try:
            tokens[name] = _tokens(name, hints[name], given)
            origins[name] = given.origin
            named |= {name} if given.origin in by_hand else set()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))

    parsed: Any = _parse(command, [token for group in tokens.values() for token in group], prog, origins)
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    return Loaded(schema(**values), parsed.dry_run, tuple(files), frozenset(named))


def load_or_exit(
    argv: Sequence[str] | None = None,
    prog: str = "python -m spmdrl.train",
    schema: type[C] = Config,
    check: Callable[[C, int], None] | None = checks.check,  # type: ignore[assignment]
    check_use: Callable[[Loaded[C]], list[str]] | None = None,
) -> Loaded[C]:
    """`from_command_line` and `check` for an entry point: a mistake is one message from rank 0 and exit code 2 on all.

    The world size is torchrun's WORLD_SIZE, 1 without it. Every rank reads the same words, so all of them leave.
    check_use: asked last, whether settings that are valid are of any use together; rank 0 tells the lines it returns.
    """
    try:
        loaded = from_command_line(argv, prog, schema)
        if check is not None:
            check(loaded.config, int(os.environ.get("WORLD_SIZE", "1")))
        for line in check_use(loaded) if check_use is not None else ():
            if _rank() == 0:
                print(redact_text(f"{prog}: {line}"), file=sys.stderr, flush=True)
    except ConfigError as error:
        if _rank() == 0:
            print(redact_text(f"{prog}: {error}"), file=sys.stderr, flush=True)
        else:
            # The first to leave has torchrun end the others, and rank 0 is yet to speak.
            time.sleep(RANK_0_SPEAKS)
        sys.exit(2)
    return loaded


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _read_flags(argv: list[str], problems: list[str]) -> tuple[list[tuple[str, Given]], list[str]]:
    """Flags with the words that follow them, and apart from them the `--config` files."""
    found: list[tuple[str, Given]] = []
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


def _read_yaml(path: str, problems: list[str]) -> list[tuple[str, Given]]:
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
    found: list[tuple[str, Given]] = []
    if root is not None:
        try:
            _flatten(root, "", path, found, problems, itertools.count())
        except OverflowError as error:
            problems.append(f"--config {path}: {error}")
    return found


def _is_resolved(path: str) -> bool:
    """Tells whether a run or `--dry-run` wrote this file, which then names every setting."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\n") == RESOLVED
    except (OSError, UnicodeDecodeError):
        return False


def _preset_layer(given: list[tuple[str, Given]], schema: type, problems: list[str]) -> list[tuple[str, Given]]:
    """The settings of the preset that was named last, as text."""
    named = [found for name, found in given if name == "algo.preset" and found.values]
    name = named[-1].values[0] if named and named[-1].values else "grpo"
    if "algo.preset" not in leaves(schema):
        return []
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f"did you mean {near[0]}? " if near else ""
        where = "" if named[-1].origin == COMMAND_LINE else f"{named[-1].origin}: "
        problems.append(f"{where}--algo.preset {name}: unknown; {hint}Valid: {', '.join(PRESETS)}")
        return []
    chosen = {leaf: found[-1] for leaf in ("algo.loss", "algo.advantage") if (found := _words(given, leaf))}
    settings = settings_of_preset(name, **{leaf.partition(".")[2]: word for leaf, word in chosen.items()})
    return [(leaf, Given([str(value)], f"preset {name}")) for leaf, value in settings.items()]


METHOD = ("algo.preset", "algo.loss", "algo.advantage")
"""Settings that decide which others a preset sets."""


def _implied_by_preset(found: list[tuple[str, Given]], every: list[tuple[str, Given]], schema: type) -> list:
    """Entries of a resolved file that only say what its preset did, where another method is chosen over the file's.

    found: the file's entries; every: those of all files and flags.
    """
    theirs, chosen = ({name: _words(given, name)[-1:] for name in METHOD} for given in (found, every))
    if "algo.preset" not in leaves(schema) or theirs == chosen or not all(theirs.values()):
        return []
    (preset,), (loss,), (advantage,) = theirs.values()
    if preset not in PRESETS:
        return []
    own = settings_of_preset(preset, loss, advantage)
    names = {*own, *METHOD, *(f"algo.{leaf}" for leaf in (*OF_LOSS, *OF_ADVANTAGE))}
    if chosen["algo.preset"] and chosen["algo.preset"][0] in PRESETS:
        names |= PRESETS[chosen["algo.preset"][0]].settings.keys()
    plain = schema()
    return [
        entry
        for entry in found
        if entry[0] in names and entry[0] != "algo.preset" and _says(entry[1], own.get(entry[0], get(plain, entry[0])))
    ]


def _says(given: Given, value: Any) -> bool:
    """The text stands for that value."""
    if given.values is None or value is None:
        return given.values is None and value is None
    if isinstance(value, tuple):
        return given.values == [str(item) for item in value]
    word = given.values[0] if len(given.values) == 1 else ""
    if isinstance(value, bool):
        return word.lower() in (TRUE if value else FALSE)
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _words(given: list[tuple[str, Given]], name: str) -> list[str]:
    """The single words given for a setting, in their order."""
    return [found.values[0] for leaf, found in given if leaf == name and found.values]


def _implied_layer(given: list[tuple[str, Given]], schema: type) -> list[tuple[str, Given]]:
    """What `--run.deterministic` asks for, unless it is said otherwise (which `checks.py` refuses)."""
    on = False
    for name, found in given:
        if name in ("run.deterministic", "run.no_deterministic"):
            yes = (found.values or ["true"])[0].lower() in TRUE
            on = yes if name == "run.deterministic" else not yes
    if not on or "rollout.assignment" not in leaves(schema):
        return []
    return [("rollout.assignment", Given(["static"], flag("run.deterministic")))]


def _flatten(
    node: yaml.Node,
    prefix: str,
    path: str,
    found: list[tuple[str, Given]],
    problems: list[str],
    nodes: Iterator[int],
) -> None:
    origin = f"{path}:{node.start_mark.line + 1}"
    # Aliases may refer to what they stand in, or multiply.
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


def _unknown(name: str, given: Given, valid: list[str]) -> str:
    """One line for a name that is not a setting, with the one that was probably meant."""
    inside = [leaf for leaf in valid if leaf.startswith(name + ".")]
    in_file = given.origin != COMMAND_LINE
    if inside:
        shown = ", ".join(inside if in_file else map(flag, inside))
        text = f"{name if in_file else flag(name)} is a section, not a setting; it holds {shown}"
    else:
        near = nearest(name, valid, 3) or nearest(name.replace(".no_", "."), valid, 1)
        # A name without its section may stand in several.
        near = [leaf for leaf in near if leaf.endswith("." + name)] or near[:1]
        kind = f"unknown key {name}" if in_file else f"unknown flag {flag(name)}"
        meant = " or ".join(near if in_file else map(flag, near))
        hint = f"did you mean {meant}?" if near else "see --help for all settings"
        text = f"{kind}; {hint}"
    return f"{given.origin}: {text}" if in_file else text


def _tokens(name: str, hint: Any, given: Given) -> list[str]:
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
        got = f"{len(values)} values ({' '.join(values)})" if values else "none"
        raise ConfigError(f"{where}: takes one value, got {got}")
    if is_optional(hint) and values[0].lower() in {"none", "null", "~", ""}:
        values = ["None"]
    # With `=`, a value may begin with a dash.
    return [f"{flag(name)}={values[0]}"]


def _parse(command: type, tokens: list[str], prog: str, origins: dict[str, str]) -> Any:
    """Parse by tyro, its boxed report on stderr turned into one ConfigError line."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return tyro.cli(command, args=tokens, prog=prog)
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
