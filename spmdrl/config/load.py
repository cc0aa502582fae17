"""Makes one Config from files and flags.

YAML is flattened to flags and goes through the same tyro parse as the command line, so a key that is wrong in a file is
wrong in the same way as a flag. The type of a field, never YAML's guess, says how its text is read: `lr: 1e-5` is a
float (YAML 1.1 calls it a string) and `enabled: off` is the word `off` (YAML 1.1 calls it false).

Order: files in the order given, then flags. Later wins, so a flag beats every file wherever it stands. A preset stands
below the other entries of the file or command line that names it, and above those of earlier files.
"""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from spmdrl.config import checks
from spmdrl.config.dump import redact_text
from spmdrl.config.fields import ConfigError, flag, leaves
from spmdrl.config.layers import (
    begun_with,
    implied_by_preset,
    implied_layer,
    own_layer,
    preset_layer,
    replaced_by_preset,
    without,
)
from spmdrl.config.raw_settings import (
    COMMAND_LINE,
    FALSE,
    TRUE,
    Entries,
    Given,
    Loaded,
    is_resolved,
    one_resampling,
    parse,
    read_flags,
    read_yaml,
    tokens_of,
    unknown_name,
)
from spmdrl.config.schema import Config
from spmdrl.config.use import check_use

C = TypeVar("C")
NEGATED = dict.fromkeys(TRUE, "false") | dict.fromkeys(FALSE, "true")
ALIASES = {"deterministic": "run.deterministic", "no_deterministic": "run.no_deterministic"}
"""Shorter names of settings."""
PRINTING = 20.0
"""Seconds that the other ranks give rank 0 to print; torchrun ends them as soon as it has left."""
# The settings that belong to the command line and not to a run.
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
    """Read `--config` files and dotted flags (`--run.steps 5`, `_` or `-` in names) into a schema.

    Args:
        argv: words after the program name; None takes sys.argv.
        prog: name shown by `--help`.
        schema: a dataclass of dataclasses: the sections that the entry point reads.
        also: schemas of other entry points, whose files are read too; settings that this one lacks are passed over.

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
    from_flags, files = read_flags(argv, problems)
    layers, by_hand, notes = _layers(files, from_flags, schema, problems)

    hints = leaves(schema) | {"dry_run": bool}
    passed_over = {name for other in also for name in leaves(other)} - hints.keys()
    tokens: dict[str, list[str]] = {}
    origins: dict[str, str] = {}
    named: set[str] = set()
    entries = one_resampling([(ALIASES.get(name, name), given) for layer in layers for name, given in layer])
    begun = begun_with(entries, schema)
    own, own_notes = own_layer(entries, schema, begun)
    for name, given in own + preset_layer(entries, schema, problems) + implied_layer(entries, schema, begun) + entries:
        positive = re.sub(r"(^|\.)no_([a-z_0-9]+)$", r"\1\2", name)
        if name not in hints and hints.get(positive) is bool and given.origin == COMMAND_LINE:
            name, given = positive, Given([NEGATED.get(word, word) for word in given.values or ["true"]], given.origin)
        if given.values is None and any(leaf.startswith(name + ".") for leaf in (*hints, *passed_over)):
            continue  # a section with nothing under it
        if name in passed_over or (given.origin == COMMAND_LINE and positive in passed_over):
            if given.origin == COMMAND_LINE:
                problems.append(f"{flag(name)}: {prog} does not read it; leave it out")
            continue
        if name not in hints or (name == "dry_run" and given.origin != COMMAND_LINE):
            problems.append(unknown_name(name, given, [n for n in (*hints, *passed_over) if n != "dry_run"]))
            continue
        try:
            tokens[name] = tokens_of(name, hints[name], given)
            origins[name] = given.origin
            named |= {name} if given.origin in by_hand else set()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))

    parsed: Any = parse(command, [token for group in tokens.values() for token in group], prog, origins)
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    words = [word for file in files for word in ("--config", file)]
    return Loaded(
        schema(**values),
        parsed.dry_run,
        tuple(files),
        frozenset(named - {"dry_run"}),
        (*notes, *own_notes),
        lambda: from_command_line(words, prog, schema, also) if files else None,
    )


def _layers(
    files: list[str], from_flags: Entries, schema: type, problems: list[str]
) -> tuple[list[Entries], set[str], tuple[str, ...]]:
    """Return the entries of each file and of the flags without those that a method chosen later replaces.

    Returns:
        The layers; the origins that a person wrote, which are not those of a run's own file; lines about the
        replacements.
    """
    read = [read_yaml(path, problems) for path in files]
    layers, by_hand = [*read, from_flags], set()
    for path, found in zip(files, read, strict=True):
        if is_resolved(path):
            layers = without(layers, implied_by_preset(found, [entry for layer in layers for entry in layer], schema))
        else:
            by_hand |= {given.origin for _, given in found}
    replaced = replaced_by_preset(layers, schema)
    layers = without(layers, [entry for entry, _ in replaced])
    return layers, by_hand | {COMMAND_LINE}, tuple(line for _, line in replaced if line)


def load_or_exit(
    argv: Sequence[str] | None = None,
    prog: str = "python -m spmdrl.train",
    schema: type[C] = Config,
    check: Callable[[C, int], None] | None = checks.check,  # type: ignore[assignment]
    also: tuple[type, ...] = (),
) -> Loaded[C]:
    """Read and check the settings of an entry point; a mistake ends all ranks with one message and exit code 2.

    The world size is torchrun's WORLD_SIZE, 1 without it. Every rank reads the same words, so all of them leave.
    Settings that the job would not read are refused as well (`use.py`).
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
    """End every rank with exit code 2 for a user's mistake, which rank 0 prints."""
    _print(message)
    if _rank() > 0:
        # When the first rank leaves torchrun ends the others, and rank 0 has yet to print.
        time.sleep(PRINTING)
    sys.exit(2)


def _print(line: str) -> None:
    if _rank() == 0:
        print(redact_text(line), file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
