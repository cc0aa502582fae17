"""Compares the settings in a run folder with the settings of a run that resumes from the folder.

Each setting declares whether a resume may change it (`declare.py`). If a resume changed a setting that it must
keep, the results would match neither the old settings nor the new ones.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import yaml

from spmdrl.config.classifier import scored_by
from spmdrl.config.declare import declared
from spmdrl.config.dump import to_dict
from spmdrl.config.engines import engine_name
from spmdrl.config.environment import acts_by
from spmdrl.config.fields import flag, leaves, shown
from spmdrl.config.judge import graded_by
from spmdrl.config.presets import with_preset
from spmdrl.config.raw_settings import CONTROLLER, DEFAULT_TARGET, POWER, RESAMPLE, RESHARD, with_power, with_target
from spmdrl.config.rewards import weighted
from spmdrl.config.schema import Config, TrainingConfig
from spmdrl.config.yaml_file import SUFFIXES


def may_change(cfg: TrainingConfig, name: str) -> bool:
    """Return True if a resume may change a setting. False for `run.steps` if the learning rate depends on it."""
    if name == "run.steps" and cfg.optimizer.schedule != "constant":
        return False
    return bool(declared(type(cfg))[name].free)


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts of settings to dotted name -> value."""
    if not isinstance(nested, dict):
        return {prefix[:-1]: nested}
    return {k: v for name, value in nested.items() for k, v in flat(value, f"{prefix}{name}.").items()}


def fixed_settings(cfg: TrainingConfig) -> dict[str, Any]:
    """Return name -> value of the settings that a resume must keep, with secrets redacted and `auto` resolved."""
    return {k: v for k, v in flat(to_dict(settings_to_record(cfg))).items() if not may_change(cfg, k)}


def file_digests(cfg: TrainingConfig) -> dict[str, list[str]]:
    """Return setting -> [file, content hash] for settings that a resume must keep and that name a user's file.

    Such files contain Python functions, jinja templates, environments, judges or reward models. For YAML files, only
    the settings that affect results are hashed. For an environment, the files that it names are also hashed. Modules
    imported by Python files are not included. Raises ValueError for a file that cannot be read.
    """
    found = {}
    for name, value in flat(to_dict(cfg)).items():
        for i, each in enumerate(value if isinstance(value, list) else [value]):
            word = weighted(each)[0] if name == "reward.more" else each
            path = word.rpartition(":")[0] if isinstance(word, str) and ".py:" in word else word
            named = isinstance(path, str) and path.endswith((".py", ".jinja", *SUFFIXES))
            if named and not may_change(cfg, name):
                try:
                    if path.endswith(SUFFIXES):
                        read = {"reward.model": scored_by, "env": acts_by}.get(name, graded_by)
                        content = read(path).encode()
                    else:
                        content = Path(path).expanduser().read_bytes()
                except OSError as error:
                    raise ValueError(f"{flag(name)} {each}: cannot read {path} ({error.strerror})") from error
                place = f"{name} {i}" if isinstance(value, list) else name
                found[place] = [path, hashlib.sha256(content).hexdigest()]
    return found


def entry_point(sections: Iterable[str], kinds: Mapping[str, type]) -> str:
    """Return the entry point that wrote settings with these sections, or "" if no entry point matches.

    kinds: entry point -> schema of its settings. A schema matches if it has all of the sections and at least one of
    them is not in its base class. If several schemas match, the one with the fewest sections is used.
    """
    # Ignore sections that no schema has; they come from another version.
    there = set(sections) & {each.name for schema in kinds.values() for each in fields(schema)}
    sizes: dict[str, int] = {}
    for name, schema in kinds.items():
        names, (base, *_) = {each.name for each in fields(schema)}, schema.__bases__
        if issubclass(base, TrainingConfig) and there <= names and there - {each.name for each in fields(base)}:
            sizes[name] = len(names)
    return min(sizes, key=sizes.__getitem__, default="")


@dataclass
class Differences:
    """Differences between the settings in a run folder and the settings of the run that resumes from it."""

    other: str = ""
    """The entry point that wrote the folder's settings if it differs from this run's, otherwise empty."""
    lines: list[str] = field(default_factory=list)
    """A line for each changed setting that a resume must keep, such as `--optimizer.lr: 0.0002 there, 0.001 here`."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user about settings in the folder that are unknown or cannot be read."""


def differences(
    path: Path, cfg: TrainingConfig, given: Collection[str] = (), kinds: Mapping[str, type] | None = None
) -> Differences:
    """Compare a run folder's `config.yaml` with the settings of this run; problems with the file become notes.

    A setting that is missing in the file counts as its default, because the file might be older than the setting. An
    older version rendered messages with ChatML if no chat template was given, so `chatml` does not count as a change
    unless the user names it. given: settings given by the user. kinds: as in `entry_point`.
    """
    out, there = Differences(), {}
    try:
        nested = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(nested, dict):
            raise TypeError("it contains no settings")
        there = flat(nested)
        if there.get(CONTROLLER) in ("fixed", "adaptive"):
            there = with_target(there, there[CONTROLLER] == "adaptive", float(DEFAULT_TARGET))
        there.pop(RESHARD, None)
        if (power := there.pop(POWER, None)) is not None and RESAMPLE in there:
            there[RESAMPLE] = with_power(there[RESAMPLE], power)
        wrote = entry_point(nested, kinds or {})
        out.other = wrote if wrote and type(cfg) is not (kinds or {})[wrote] else ""
        unknown = sorted(set(there) - set(leaves(type(cfg))))
        if unknown:
            out.notes.append(f"{path} has settings that this version does not know: {', '.join(unknown)}")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, AttributeError, TypeError) as error:
        what = " ".join(str(error).split())
        out.notes.append(f"{path} cannot be read ({what}): its settings are taken to be the defaults")
    run = cast(Config, cfg)
    plain = with_preset(type(run)(), run.algo.preset) if hasattr(cfg, "algo") else type(cfg)()
    defaults = flat(to_dict(plain))
    for name, here in fixed_settings(cfg).items():
        then = there.get(name, defaults.get(name))
        why = ""
        if name == "rollout.engine":
            # A config.yaml written by a user can contain auto, which resolves to the same engine as in this run.
            then = then if then != "auto" else engine_name(replace(run, rollout=replace(run.rollout, engine="auto")))
            why = " (by auto)" if run.rollout.engine == "auto" else ""
        implied = name == "data.chat_template" and name not in given and (then, here) == ("", "chatml")
        if then != here and not implied:
            out.lines.append(f"{flag(name)}: {shown(then)} there, {shown(here)} here{why}")
    return out


def settings_to_record(cfg: TrainingConfig) -> TrainingConfig:
    """Return the settings to write to config.yaml.

    `fresh` and `allow_changes`, which apply only to this start, are reset, and `auto` is resolved for the engine.
    """
    cfg = replace(cfg, run=replace(cfg.run, fresh=False, allow_changes=False))
    if hasattr(cfg, "rollout"):
        run = cast(Config, cfg)
        cfg = replace(run, rollout=replace(run.rollout, engine=engine_name(run)))
    return cfg
