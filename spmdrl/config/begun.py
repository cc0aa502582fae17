"""Reads the settings with which a run folder was begun, for those that no flag or file names.

A run that goes on keeps them, also where the defaults of the program that began it were others.
"""

from dataclasses import dataclass, field
from pathlib import Path

from spmdrl.config.fields import get, leaves
from spmdrl.config.given import FALSE, Entries, Given, read_yaml
from spmdrl.config.paths import recorded_settings


@dataclass
class Begun:
    """Settings of a run folder; no entries where no run goes on."""

    path: str = ""
    entries: dict[str, Given] = field(default_factory=dict)

    def instead_of(self, layer: Entries) -> Entries:
        """Return a layer with the folder's values; what a folder lacks had the schema's default."""
        return [(name, self.entries[name]) for name, _ in layer if name in self.entries] if self.entries else layer


def begun_with(given: Entries, schema: type) -> Begun:
    """Return the settings of the folder from which a run goes on. given: entries of all files and flags."""
    names, last = leaves(schema), {name: "".join((found.values or [])[-1:]) for name, found in given}
    if not {"run.dir", "run.name", "data.train"} <= names.keys():
        return Begun()
    if "run.fresh" in last and last["run.fresh"].lower() not in FALSE:
        return Begun()
    folder = last.get("run.dir") or Path("runs") / (last.get("run.name") or get(schema(), "run.name"))
    try:
        path = recorded_settings(Path(folder))
        return Begun(str(path), dict(read_yaml(str(path), []))) if path.is_file() else Begun()
    except (OSError, ValueError):
        # A folder that cannot be looked at is refused where it is taken.
        return Begun()
