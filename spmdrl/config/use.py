"""Refuses settings that a user gave but the run does not read, because they would silently have no effect.

Settings declare when a job reads them (`only_with` in `declare.py`). The error suggests a change to one other setting
that would make the job read the refused one. Such changes are found by trying them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from spmdrl.config.composition import advantage_of, loss_of
from spmdrl.config.declare import declared
from spmdrl.config.environment import check_reward_is_chosen
from spmdrl.config.fields import ConfigError, flag, get, is_optional, is_tuple, leaves, refuse, shown
from spmdrl.config.named import function_tables
from spmdrl.config.parameters import KINDS, only_of, read_by, read_by_any
from spmdrl.config.presets import settings_of_preset
from spmdrl.config.raw_settings import Loaded

MOST_SHOWN = 3


def check_use(loaded: Loaded[Any]) -> list[str]:
    """Refuse settings that the user gave but the run does not read. Return a line for each one that is accepted.

    Settings are not checked if they have their defaults or come from a preset or a config.yaml that a run wrote. A
    setting in a file is accepted if a run with only the files would read it, because a flag might have turned off its
    use: `--config run.yaml --eval.every 0`.

    Raises:
        ConfigError: a setting is refused, or an environment is given without a reward. The message has a line for each
            refused setting: its flag, its value, and the changes that would make the run read it.
    """
    config = loaded.config
    if "env" in leaves(type(config)):
        check_reward_is_chosen(config, loaded.given)
    try:
        unread = [name for name in sorted(loaded.given) if not at_rest(config, name) and not is_read(config, name)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    alone = loaded.without_flags() if unread else None
    off = [
        name
        for name in unread
        if alone and name in alone.given and get(alone.config, name) == get(config, name)
        if would_read(alone.config, name)
    ]
    lines = [f"{flag(name)} {shown(get(config, name))}: {advice(config, name)}" for name in unread if name not in off]
    refuse(lines, "without effect")
    return [f"{flag(name)} {shown(get(config, name))} has no effect together with these flags" for name in off]


def is_read(config: Any, name: str) -> bool:
    """Return True if a job with these settings reads the setting `name`. Raises ValueError if the method is invalid."""
    if name in leaves_of_functions(type(config)):
        return name in read_by(loss_of(config)) | read_by(advantage_of(config))
    condition = declared(type(config))[name].only_with
    # A loss or advantage in a user's file can take any setting in `algo` as a parameter.
    own = name.startswith("algo.") and name in read_by(loss_of(config)) | read_by(advantage_of(config))
    return condition is None or bool(condition(config)) or own


def leaves_of_functions(schema: type) -> frozenset[str]:
    """Return the settings in a schema that only losses and advantages read, if any."""
    if "algo.loss" not in leaves(schema):
        return frozenset()
    return read_by_any("loss") | read_by_any("advantage")


def at_rest(config: Any, name: str) -> bool:
    """Return True if the setting `name` has its default value or the preset's value."""
    default, preset = get(type(config)(), name), {}
    if hasattr(config, "algo"):
        preset = settings_of_preset(config.algo.preset, config.algo.loss, config.algo.advantage)
    return get(config, name) in (default, preset.get(name, default))


# ── changes that let a job read a setting ────────────────────────────────────────────────


def would_read(config: Any, name: str) -> bool:
    """Return True if a job with these settings reads the setting `name`, or False if the method is invalid."""
    try:
        return is_read(config, name)
    except (ValueError, KeyError):
        return False


def single_changes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for single-setting changes that might make a run read other settings."""
    tables = function_tables()
    for name, hint in leaves(type(config)).items():
        value, default = get(config, name), get(type(config)(), name)
        if name in tables:
            choices = [(each,) for each in tables[name]] if is_tuple(hint) else list(tables[name])
        elif get_origin(hint) is Literal:
            choices = list(get_args(hint))
        elif hint is bool:
            choices = [not value]
        elif hint in (int, float):
            choices = [1] if value == 0 else [default]
        elif hint is str:
            choices = ["..."] if value == "" else [default]
        elif is_tuple(hint):
            choices = [("...", "...")] if not value else [default]
        else:
            given = [1] if value is None and float in get_args(hint) else []
            choices = [*given, None] if is_optional(hint) else []
        yield from ((name, choice) for choice in choices if choice != value)


def changed(config: Any, name: str, value: Any) -> Any:
    """Return a copy of the settings with the setting `name` changed to `value`."""
    section, _, leaf = name.rpartition(".")
    if section:
        name, value = section, dataclasses.replace(getattr(config, section), **{leaf: value})
    return dataclasses.replace(config, **{name: value})


def readers(config: Any, name: str) -> list[tuple[str, Any]]:
    """Return (name, value) for each change to one other setting that would make a run read the setting `name`."""
    tried = ((other, value) for other, value in single_changes(config) if other != name)
    return [(other, value) for other, value in tried if would_read(changed(config, other, value), name)]


def advice(config: Any, name: str) -> str:
    """Return advice about a setting that the run does not read."""
    for kind in KINDS if hasattr(config, "algo") else ():
        own = getattr(config.algo, kind)
        if ".py:" in own and name in only_of(kind) and name != "algo.aggregation":
            return f"nothing in this run reads it; let {own} take a parameter of that name, or leave it out"
    found = ways(config, name)
    several = len(found) > 1 or "|" in "".join(found)
    choose = "give one of these" if several else "set that"
    needs = f"it needs {' or '.join(found)}; {choose}, or leave it out" if found else "leave it out"
    log = name.startswith("reward.") and not getattr(config, "learns_from_rewards", True)
    return f"{'rewards are only logged, and ' if log else ''}nothing in this run reads it; {needs}"


def ways(config: Any, name: str) -> list[str]:
    """Return the most likely changes that would make a run read a setting, as text: `--lora.rank above 0`."""
    by_flag: dict[str, list[Any]] = {}
    # List changes in the same section first, because the user most likely means one of them.
    section = name.split(".")[0]
    for change, value in sorted(readers(config, name), key=lambda reader: reader[0].split(".")[0] != section):
        by_flag.setdefault(change, []).append(value)
    return [in_words(change, values) for change, values in list(by_flag.items())[:MOST_SHOWN]]


def in_words(name: str, values: list[Any]) -> str:
    """Return a flag with its values: `--algo.loss ppo | gspo`."""
    if values == [1]:
        return f"{flag(name)} above 0"
    if values in (["..."], [("...", "...")]):
        return flag(name)
    more = ", ..." if len(values) > MOST_SHOWN else ""
    return f"{flag(name)} {' | '.join(map(shown, values[:MOST_SHOWN]))}{more}"
