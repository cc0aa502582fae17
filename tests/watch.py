"""Settings that record which of them are read."""

import copy
import dataclasses
from typing import Any, TypeVar

C = TypeVar("C")


def watch(config: C) -> tuple[C, set[str]]:
    """Returns a twin of a config, and a set that gets the dotted name of each setting that is read from the twin."""
    seen: set[str] = set()
    return _watched(config, "", seen), seen


def _watched(section: Any, prefix: str, seen: set[str]) -> Any:
    """Returns a twin of a section. Reads of its settings are recorded under names that begin with `prefix`."""
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
