"""Settings that note which of them are looked at."""

import copy
import dataclasses
from typing import Any, TypeVar

C = TypeVar("C")


def watch(config: C) -> tuple[C, set[str]]:
    """A twin of a config, and the dotted names of the settings that have been read from the twin so far."""
    seen: set[str] = set()
    twin: Any = copy.copy(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        setattr(twin, field.name, _watched(getattr(config, field.name), field.name, seen))
    return twin, seen


def _watched(section: Any, name: str, seen: set[str]) -> Any:
    if not dataclasses.is_dataclass(section):
        return section
    kind, names = type(section), {field.name for field in dataclasses.fields(section)}

    def look(self: Any, attribute: str) -> Any:
        if attribute in names:
            seen.add(f"{name}.{attribute}")
        return object.__getattribute__(self, attribute)

    twin: Any = copy.copy(section)
    twin.__class__ = type(kind.__name__, (kind,), {"__getattribute__": look})
    return twin
