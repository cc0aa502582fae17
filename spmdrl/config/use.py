"""Refuses settings that a user gave and that nothing in the run reads: they would be silently without effect.

Settings declare when a job reads them (`only_with` in `declare.py`). What to do instead is found by trying: with which
single change of another setting would the job read this one?
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from spmdrl.config.composition import advantage_of, loss_of
from spmdrl.config.declare import declared
from spmdrl.config.environment import check_reward_is_chosen
from spmdrl.config.fields import ConfigError, flag, get, is_optional, is_tuple, leaves, shown
from spmdrl.config.named import function_tables
from spmdrl.config.parameters import KINDS, only_of, read_by, read_by_any
from spmdrl.config.presets import settings_of_preset

if TYPE_CHECKING:
    from spmdrl.config.load import Loaded

MOST_SHOWN = 3


def check_use(loaded: "Loaded[Any]") -> list[str]:
    """Refuse settings that a user gave and that the run would not look at; lines to tell of those that may stand.

    Settings of presets, of a run folder's own config.yaml and at their defaults are not judged. A file's may stand that
    the file itself makes use of and a flag beside it does not: `--config run.yaml --eval.every 0`.

    Raises:
        ConfigError: one line for each such setting: its flag, its value and the settings that would be read beside it.
            Or an environment is given, and no reward.
    """
    config = loaded.config
    if "env" in leaves(type(config)):
        check_reward_is_chosen(config, loaded.given)
    try:
        unread = [name for name in sorted(loaded.given) if not at_rest(config, name) and not is_read(config, name)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    moot = turned_off(loaded, unread) if unread else []
    unread = [name for name in unread if name not in moot]
    if unread:
        count = "1 setting" if len(unread) == 1 else f"{len(unread)} settings"
        lines = [f"{flag(name)} {shown(get(config, name))}: {advice(config, name)}" for name in unread]
        raise ConfigError("\n  ".join([f"{count} without effect:", *lines]))
    return [f"{flag(name)} {shown(get(config, name))} has no effect beside these flags" for name in moot]


def is_read(config: Any, name: str) -> bool:
    """Tell whether a job with these settings reads one of them.

    Raises:
        ValueError: the settings cannot be composed.
    """
    if name in leaves_of_functions(type(config)):
        return name in read_by(loss_of(config)) | read_by(advantage_of(config))
    condition = declared(type(config))[name].only_with
    # A user's own loss or advantage may take other settings of `algo` by name, too.
    own = name.startswith("algo.") and name in read_by(loss_of(config)) | read_by(advantage_of(config))
    return condition is None or bool(condition(config)) or own


def leaves_of_functions(schema: type) -> frozenset[str]:
    """Return the settings of a schema that functions of losses and advantages read, and nothing else."""
    if "algo.loss" not in leaves(schema):
        return frozenset()
    return read_by_any("loss") | read_by_any("advantage")


def turned_off(loaded: "Loaded[Any]", unread: list[str]) -> list[str]:
    """Return those that a file gives and that the run of the files alone, without flags, would read."""
    # Late: `load.py` stands above.
    from spmdrl.config.load import from_command_line

    if not loaded.files:
        return []
    words = [word for file in loaded.files for word in ("--config", file)]
    alone = from_command_line(words, schema=type(loaded.config), also=loaded.also)
    theirs = [n for n in unread if n in alone.given and get(alone.config, n) == get(loaded.config, n)]
    return [name for name in theirs if would_read(alone.config, name)]


def at_rest(config: Any, name: str) -> bool:
    """The setting has its default, or the value that the preset gives it."""
    default, preset = get(type(config)(), name), {}
    if hasattr(config, "algo"):
        preset = settings_of_preset(config.algo.preset, config.algo.loss, config.algo.advantage)
    return get(config, name) in (default, preset.get(name, default))


# ── what would read a setting ────────────────────────────────────────────────


def would_read(config: Any, name: str) -> bool:
    """Tell whether a job reads a setting; False where its settings cannot be composed."""
    try:
        return is_read(config, name)
    except (ValueError, KeyError):
        return False


def single_changes(config: Any) -> Iterator[tuple[str, Any]]:
    """Settings that may make a run look at others, each with a value that it does not have."""
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
    """Return the settings with another value of one."""
    section, _, leaf = name.rpartition(".")
    if section:
        name, value = section, dataclasses.replace(getattr(config, section), **{leaf: value})
    return dataclasses.replace(config, **{name: value})


def readers(config: Any, name: str) -> list[tuple[str, Any]]:
    """Return the single changes of other settings with which a run reads this one."""
    tried = ((other, value) for other, value in single_changes(config) if other != name)
    return [(other, value) for other, value in tried if would_read(changed(config, other, value), name)]


def advice(config: Any, name: str) -> str:
    """Say what to do with a setting that nothing reads."""
    for kind in KINDS if hasattr(config, "algo") else ():
        own = getattr(config.algo, kind)
        if ".py:" in own and name in only_of(kind) and name != "algo.aggregation":
            return f"nothing in this run reads it; let {own} take a parameter of that name, or leave it out"
    found = ways(config, name)
    needs = f"it needs {' or '.join(found)}; give one of these, or leave it out" if found else "leave it out"
    log = name.startswith("reward.") and not getattr(config, "learns_from_rewards", True)
    return f"{'rewards are for the log alone, and ' if log else ''}nothing in this run reads it; {needs}"


def ways(config: Any, name: str) -> list[str]:
    """Return the likeliest changes with which a run reads a setting, as flags: `--lora.rank above 0`."""
    by_flag: dict[str, list[Any]] = {}
    # A setting of the same section is the likeliest to be meant.
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
