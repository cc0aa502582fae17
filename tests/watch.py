"""Settings that note which of them are looked at."""

import copy
import dataclasses
from typing import Any, TypeVar

C = TypeVar("C")


def watch(config: C) -> tuple[C, set[str]]:
    """A twin of a config, and the dotted names of the settings that have been read from the twin so far."""
    seen: set[str] = set()
    return _watched(config, "", seen), seen


def _watched(section: Any, prefix: str, seen: set[str]) -> Any:
    """A twin of a section, whose settings are noted under names that begin with `prefix`."""
    kind, names = type(section), set()
    twin: Any = copy.copy(section)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            object.__setattr__(twin, field.name, _watched(value, f"{prefix}{field.name}.", seen))
        else:
            names.add(field.name)

    def look(self: Any, attribute: str) -> Any:
        if attribute in names:
            seen.add(prefix + attribute)
        return object.__getattribute__(self, attribute)

    twin.__class__ = type(kind.__name__, (kind,), {"__getattribute__": look})
    return twin
