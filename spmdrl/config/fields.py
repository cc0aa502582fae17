"""The settings of a schema as flat dotted names, and the one exception of this room."""

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A user's mistake in a setting. The message is complete: what was given, where, and what would be valid."""


@functools.cache
def leaves(schema: type) -> dict[str, Any]:
    """Dotted name -> type of every setting of a dataclass of dataclasses, in the order of the schema.

    A field that is hidden from the schema's job (`declare.hides`) is no setting of it.
    """
    hints = get_type_hints(schema, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= {f"{field.name}.{name}": leaf for name, leaf in leaves(hint).items()}
        else:
            found[field.name] = hint
    return found


def get(config: Any, name: str) -> Any:
    """Value of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def flag(name: str) -> str:
    """Spelling of a dotted name on the command line: `rollout.max_new_tokens` -> `--rollout.max-new-tokens`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else repr(value) if value == "" else str(value)


def is_optional(hint: Any) -> bool:
    """True where None is a valid value."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def is_tuple(hint: Any) -> bool:
    """True where the setting takes several values."""
    return get_origin(hint) is tuple


def nearest(name: str, valid: Iterable[str], count: int = 1) -> list[str]:
    """The valid names a user may have meant, best first, at most `count` of them; empty when none is near.

    A name whose last part is right comes before one that is spelled alike: `steps` means `run.steps`.
    """
    valid = list(valid)
    last = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in valid if candidate.rpartition(".")[2] == last]
    same_leaf.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in reversed(valid)}
    # A shared section alone makes long names alike, so the last part must be alike too.
    alike = [
        candidate
        for candidate in difflib.get_close_matches(name, valid, n=5, cutoff=0.6)
        if difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio() > 0.5
    ]
    alike_leaf = [by_leaf[leaf] for leaf in difflib.get_close_matches(last, by_leaf, n=count, cutoff=0.75)]
    return list(dict.fromkeys([*same_leaf, *alike, *alike_leaf]))[:count]


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with all problems, one line each; does nothing if there is none."""
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        raise ConfigError("\n  ".join([f"{count} to change:", *problems]))
