"""Access to settings by dotted name, and `ConfigError`, the exception for mistakes in settings."""

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A user error in a setting. The message names the setting and says what to change."""


@functools.cache
def leaves(schema: type) -> dict[str, Any]:
    """Return dotted name -> type for every setting in nested dataclasses, in schema order.

    Fields that are hidden from the schema's job (`declare.hides`) are omitted.
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
    """Return the value of a setting by its dotted name, such as `run.steps`."""
    return functools.reduce(getattr, name.split("."), config)


def flag(name: str) -> str:
    """Return the flag of a setting: `rollout.max_new_tokens` -> `--rollout.max-new-tokens`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """Return a setting's value as text, as a user would write it on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else repr(value) if value == "" else str(value)


def is_optional(hint: Any) -> bool:
    """Return True if a setting of this type can be None."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def is_tuple(hint: Any) -> bool:
    """Return True if a setting of this type takes several values."""
    return get_origin(hint) is tuple


def nearest(name: str, valid: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` valid names that the user might have meant, best first, or [] if none is close.

    Names with the same last component come before names with similar spelling: `steps` means `run.steps`.
    """
    valid = list(valid)
    last = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in valid if candidate.rpartition(".")[2] == last]
    same_leaf.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in reversed(valid)}
    # Names in the same section are similar by their common prefix alone, so also require similar last components.
    alike = [
        candidate
        for candidate in difflib.get_close_matches(name, valid, n=5, cutoff=0.6)
        if difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio() > 0.5
    ]
    alike_leaf = [by_leaf[leaf] for leaf in difflib.get_close_matches(last, by_leaf, n=count, cutoff=0.75)]
    return list(dict.fromkeys([*same_leaf, *alike, *alike_leaf]))[:count]


class Problems(list[str]):
    """Lines about the settings of `config` that the user must change, one per setting."""

    def __init__(self, config: Any, lines: Iterable[str] = ()):
        super().__init__(lines)
        self.config = config

    def add(self, name: str, advice: str) -> None:
        """Append a line with the setting's flag and value, and the advice."""
        self.append(f"{flag(name)} {shown(get(self.config, name))}: {advice}")


def refuse(problems: list[str], why: str = "to change") -> None:
    """Raise ConfigError with one line per problem, if there are any."""
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        raise ConfigError("\n  ".join([f"{count} {why}:", *problems]))
