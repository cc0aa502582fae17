"""One step of a run's method on made-up tokens (`rl/rehearsed.py`), before anything is built: which settings are read?

The functions are those that the run will call, from the composition to the update. A setting that a user gave and that
nothing here read would be silently without effect, so it is refused, with the settings that would make something read
it. Sections that say where and how fast a run computes are not judged here: `config/` has rules for them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.environment import check_reward_is_chosen
from spmdrl.config.fields import ConfigError, flag, get, is_optional, leaves, shown
from spmdrl.config.load import Loaded, from_command_line
from spmdrl.config.online_preference import OnlinePreferenceConfig
from spmdrl.config.parameters import only_of
from spmdrl.config.presets import settings_of_preset
from spmdrl.config.schema import Config
from spmdrl.config.watch import watch
from spmdrl.rl.rehearsed import rehearse, rehearse_distillation, rehearse_online, rehearse_rest

JUDGED = (
    *("algo", "correction", "shaping", "filter", "critic", "process_reward", "safety", "reference", "lora", "eval"),
    *("reward", "optimizer"),
)
"""Sections that say what is learnt."""
ELSEWHERE = {
    "reference.offload": "memory of frozen models",
    "reward.workers": "grading processes",
    "reward.timeout": "grading processes",
    "reward.on_timeout": "grading processes",
    "reward.function": "the sampling loop",
    "reward.more": "the sampling loop",
    "reward.gate": "the sampling loop",
    "reward.kwargs": "grading processes",
    "reward.max_ungraded": "the sampling loop",
    "filter.bad_sample": "the sampling loop",
    "algo.preset": "the layer that it is",
}
"""Settings of those sections that other parts of a run read, each with that part."""
MOST_SHOWN = 3


def check_use(loaded: Loaded[Any]) -> list[str]:
    """Refuse settings that a user gave and that the run would not look at; lines to tell of those that may stand.

    Settings of presets, of a run folder's own config.yaml and at their defaults are not judged. A file's may stand that
    the file itself makes use of and a flag beside it does not: `--config run.yaml --eval.every 0`.

    Raises:
        ConfigError: one line for each such setting: its flag, its value and the settings that would be read beside it.
            Or an environment is given, and no reward.
    """
    config = loaded.config
    check_reward_is_chosen(config, loaded.given)
    asked = [name for name in sorted(loaded.given) if is_judged(name) and not at_rest(config, name)]
    if not asked:
        return []
    try:
        seen = settings_read(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    unread = [name for name in asked if name not in seen]
    moot = turned_off(loaded, unread) if unread else []
    unread = [name for name in unread if name not in moot]
    if unread:
        count = "1 setting" if len(unread) == 1 else f"{len(unread)} settings"
        readers: dict[str, list[tuple[str, Any]]] = {name: [] for name in unread}
        for change, value in single_changes(config):
            then = read_after(config, change, value)
            for name in unread:
                if name in then and name != change:
                    readers[name].append((change, value))
        lines = [f"{flag(name)} {shown(get(config, name))}: {advice(config, name, readers[name])}" for name in unread]
        raise ConfigError("\n  ".join([f"{count} without effect:", *lines]))
    return [f"{flag(name)} {shown(get(config, name))} has no effect beside these flags" for name in moot]


def turned_off(loaded: Loaded[Any], unread: list[str]) -> list[str]:
    """Returns those that a file gives and that the run of the files alone, without flags, would read."""
    if not loaded.files:
        return []
    schema = type(loaded.config)
    alone = from_command_line([word for file in loaded.files for word in ("--config", file)], schema=schema)
    theirs = [n for n in unread if n in alone.given and get(alone.config, n) == get(loaded.config, n)]
    try:
        seen = settings_read(alone.config) if theirs else set()
    except ValueError:
        return []
    return [name for name in theirs if name in seen]


def is_judged(name: str) -> bool:
    """Tells whether the rehearsal covers everything that reads this setting."""
    return name.split(".")[0] in JUDGED and name not in ELSEWHERE


def at_rest(config: Config, name: str) -> bool:
    """The setting has its default, or the value that the preset gives it."""
    algo, default = config.algo, get(type(config)(), name)
    preset = settings_of_preset(algo.preset, algo.loss, algo.advantage)
    return get(config, name) in (default, preset.get(name, default))


def settings_read(config: Config) -> set[str]:
    """Dotted names of the settings that one rehearsed step looks at.

    Raises:
        ValueError: the settings cannot be composed.
    """
    watched, seen = watch(config)
    if isinstance(config, DistillationConfig) and isinstance(watched, DistillationConfig):
        rehearse_distillation(watched, config)
    elif isinstance(config, OnlinePreferenceConfig) and isinstance(watched, OnlinePreferenceConfig):
        rehearse_online(watched, config)
    else:
        rehearse(watched, config)
    rehearse_rest(watched, config)
    return set(seen)


# ── what would read a setting ────────────────────────────────────────────────


def single_changes(config: Config) -> Iterator[tuple[str, Any]]:
    """Settings that may make a run look at others, each with a value that it does not have."""
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES

    tables = {"algo.advantage": ADVANTAGES, "algo.loss": LOSSES, "filter.keep": FILTERS}
    for name, hint in leaves(type(config)).items():
        if not (is_judged(name) or name == "data.eval"):
            continue
        value, default = get(config, name), get(type(config)(), name)
        if name in tables:
            choices = list(tables[name])
        elif get_origin(hint) is Literal:
            choices = list(get_args(hint))
        elif hint is bool:
            choices = [not value]
        elif hint in (int, float):
            choices = [1] if value == 0 else [default]
        elif hint is str:
            choices = ["..."] if value == "" else [default]
        else:
            given = [1] if value is None and float in get_args(hint) else []
            choices = [*given, None] if is_optional(hint) else []
        yield from ((name, choice) for choice in choices if choice != value)


def read_after(config: Config, name: str, value: Any) -> set[str]:
    """`settings_read` with one setting changed; nothing where that cannot be composed."""
    section, _, leaf = name.partition(".")
    changed = dataclasses.replace(getattr(config, section), **{leaf: value})
    try:
        return settings_read(dataclasses.replace(config, **{section: changed}))
    except (ValueError, KeyError):
        return set()


def advice(config: Config, name: str, readers: list[tuple[str, Any]]) -> str:
    """Says what to do with a setting that nothing reads."""
    for own, settings in ((config.algo.loss, only_of("loss")), (config.algo.advantage, only_of("advantage"))):
        if ".py:" in own and name in settings and name != "algo.aggregation":
            return f"nothing in this run reads it; let {own} take a parameter of that name, or leave it out"
    by_flag: dict[str, list[Any]] = {}
    # A setting of the same section is the likeliest to be meant.
    for change, value in sorted(readers, key=lambda reader: reader[0].split(".")[0] != name.split(".")[0]):
        by_flag.setdefault(change, []).append(value)
    ways = []
    for change, values in list(by_flag.items())[:MOST_SHOWN]:
        if values == [1] or values == ["..."]:
            ways.append(f"{flag(change)}" + (" above 0" if values == [1] else ""))
        else:
            more = ", ..." if len(values) > MOST_SHOWN else ""
            ways.append(f"{flag(change)} {' | '.join(map(shown, values[:MOST_SHOWN]))}{more}")
    needs = f"it needs {' or '.join(ways)}; give one of these, or leave it out" if ways else "leave it out"
    log = isinstance(config, DistillationConfig) and name.startswith("reward.")
    return f"{'rewards are for the log alone, and ' if log else ''}nothing in this run reads it; {needs}"
