"""Builds a Config from files and flags.

Entries in YAML files are converted to flags and parsed by tyro like the command line, so mistakes in files are reported
like mistakes in flags. A value is parsed according to its field's type rather than YAML's: `lr: 1e-5` is a float (a
string in YAML 1.1), and `enabled: off` is the word `off` (false in YAML 1.1).

Files apply in the order given, and flags after all files. Later values override earlier ones, so a flag overrides every
file, wherever the flag is on the command line. A preset overrides earlier files. Other entries in the same file or on
the same command line override the preset.
"""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from spmdrl.config import checks, layers
from spmdrl.config import raw_settings as raw
from spmdrl.config.dump import redact_text
from spmdrl.config.fields import ConfigError, flag, leaves
from spmdrl.config.raw_settings import COMMAND_LINE, FALSE, TRUE, Entries, Given, Loaded
from spmdrl.config.schema import Config
from spmdrl.config.use import check_use

C = TypeVar("C")
NEGATED = dict.fromkeys(TRUE, "false") | dict.fromkeys(FALSE, "true")
ALIASES = {"deterministic": "run.deterministic", "no_deterministic": "run.no_deterministic"}
"""Short form of a flag -> the setting that it sets."""
PRINTING = 20.0
"""Seconds that all ranks except 0 wait before they exit. torchrun kills all ranks when one exits, so waiting lets rank
0 print first."""
# Command-line flags that are not run settings.
_FILES = Annotated[tuple[str, ...], tyro.conf.arg(help="YAML file with settings; may be given again, later wins.")]
_DRY_RUN = Annotated[bool, tyro.conf.arg(help="Print the resolved config and the plan, and stop.")]
_EXTRA = [
    ("config", _FILES, dataclasses.field(default=())),
    ("dry_run", _DRY_RUN, dataclasses.field(default=False)),
]


def from_command_line(
    argv: Sequence[str] | None = None,
    prog: str = "python -m spmdrl.train",
    schema: type[C] = Config,
    also: tuple[type, ...] = (),
) -> Loaded[C]:
    """Load `--config` files and dotted flags (`--run.steps 5`, `_` or `-` in names) into a schema.

    Args:
        argv: command-line arguments without the program name. Use None for the arguments in sys.argv.
        prog: name shown by `--help`.
        schema: a dataclass of dataclasses: the sections that the entry point reads.
        also: schemas of other entry points. Config files for these entry points are accepted, too, and settings that
            `schema` lacks are ignored.

    Raises:
        ConfigError: names are unknown or files cannot be read (the message lists all), or a value has the wrong type.
        SystemExit: with code 0 after `--help` (printed on rank 0).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    command = dataclasses.make_dataclass(schema.__name__, _EXTRA, bases=(schema,))
    command.__doc__ = schema.__doc__
    if "--help" in argv or "-h" in argv:
        tyro.cli(command, args=["--help"], prog=prog, console_outputs=_rank() == 0)

    problems: list[str] = []
    from_flags, files = raw.read_flags(argv, problems)
    entries, by_hand, notes = _layered(files, from_flags, schema, problems)
    passed_over = {name for other in also for name in leaves(other)}
    tokens, origins = _tokens(entries, schema, passed_over, prog, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    last = {name: each[-1] for name, each in origins.items()}
    parsed: Any = raw.parse(command, [token for group in tokens.values() for token in group], prog, last)
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    words = [word for file in files for word in ("--config", file)]
    return Loaded(
        schema(**values),
        parsed.dry_run,
        frozenset(name for name, each in origins.items() if not by_hand.isdisjoint(each)) - {"dry_run"},
        notes,
        lambda: from_command_line(words, prog, schema, also) if files else None,
    )


def _layered(
    files: list[str], from_flags: Entries, schema: type, problems: list[str]
) -> tuple[Entries, set[str], tuple[str, ...]]:
    """Return the entries of all layers in order. A method chosen in a later layer discards entries for earlier methods.

    Returns:
        (entries, origins, notes). Later entries override earlier ones. The origins are the entries' files and the
        command line, except for files written by a run. The notes tell the user about replaced entries and defaults.
    """
    read = [raw.read_yaml(path, problems) for path in files]
    given, by_hand = [*read, from_flags], {COMMAND_LINE}
    for path, found in zip(files, read, strict=True):
        if raw.is_resolved(path):
            every = [entry for layer in given for entry in layer]
            given = layers.without(given, layers.implied_by_preset(found, every, schema))
        else:
            by_hand |= {each.origin for _, each in found}
    replaced = layers.replaced_by_preset(given, schema)
    given = layers.without(given, [entry for entry, _ in replaced])
    entries = raw.one_resampling([(ALIASES.get(name, name), each) for layer in given for name, each in layer])
    begun = layers.begun_with(entries, schema)
    own, own_notes = layers.own_layer(entries, schema, begun)
    implied = layers.implied_layer(entries, schema, begun)
    below = own + layers.preset_layer(entries, schema, problems) + implied
    return below + entries, by_hand, (*(line for _, line in replaced if line), *own_notes)


def _tokens(
    entries: Entries, schema: type, passed_over: set[str], prog: str, problems: list[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return each setting's words for tyro, and its origins. passed_over: names to ignore in files."""
    hints = leaves(schema) | {"dry_run": bool}
    passed_over -= hints.keys()
    tokens: dict[str, list[str]] = {}
    origins: dict[str, list[str]] = {}
    for name, given in entries:
        positive, is_flag = re.sub(r"(^|\.)no_([a-z_0-9]+)$", r"\1\2", name), given.origin == COMMAND_LINE
        if name not in hints and hints.get(positive) is bool and is_flag:
            name, given = positive, Given([NEGATED.get(word, word) for word in given.values or ["true"]], given.origin)
        if given.values is None and any(leaf.startswith(name + ".") for leaf in (*hints, *passed_over)):
            continue  # an empty section has no settings
        if is_flag and not passed_over.isdisjoint((name, positive)):
            problems.append(f"{flag(name)}: {prog} does not read it; leave it out")
        elif name in passed_over:
            continue
        elif name not in hints or (name == "dry_run" and not is_flag):
            problems.append(raw.unknown_name(name, given, [n for n in (*hints, *passed_over) if n != "dry_run"]))
        else:
            try:
                tokens[name] = raw.tokens_of(name, hints[name], given)
                origins.setdefault(name, []).append(given.origin)
            except ConfigError as error:
                problems.append(str(error))
    return tokens, origins


def load_or_exit(
    argv: Sequence[str] | None = None,
    prog: str = "python -m spmdrl.train",
    schema: type[C] = Config,
    check: Callable[[C, int], None] | None = checks.check,  # type: ignore[assignment]
    also: tuple[type, ...] = (),
) -> Loaded[C]:
    """Load and check the settings of an entry point. On a user error, all ranks exit with code 2 and a single message.

    The world size is torchrun's WORLD_SIZE, or 1 without torchrun. All ranks read the same arguments, so all of them
    exit. Settings that the job would not read are refused, too (`use.py`).
    """
    try:
        loaded = from_command_line(argv, prog, schema, also)
        if check is not None:
            check(loaded.config, int(os.environ.get("WORLD_SIZE", "1")))
        for line in (*(f"note: {note}" for note in loaded.notes), *(f"{prog}: {each}" for each in check_use(loaded))):
            _print(line)
    except ConfigError as error:
        exit_with(f"{prog}: {error}")
    return loaded


def exit_with(message: str) -> NoReturn:
    """Exit with code 2 because of a user error, printed by rank 0. Every rank calls this."""
    _print(message)
    if _rank() > 0:
        # torchrun kills all ranks when the first one exits, so give rank 0 time to print.
        time.sleep(PRINTING)
    sys.exit(2)


def _print(line: str) -> None:
    if _rank() == 0:
        print(redact_text(line), file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
