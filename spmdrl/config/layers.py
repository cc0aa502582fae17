"""Layers of values that files and flags override.

The layers are, from lowest to highest priority: defaults for runs other than the demo, values of a preset, and values
implied by another setting. The demo trains the bundled model on a built-in task. The bundled model keeps the demo's
learning rate and response length on any data; built-in tasks keep the demo's response length and evaluation with any
model. A run that continues in its folder keeps the values recorded there for these layers, even if the defaults in this
version differ.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdrl.config.fields import flag, get, leaves, nearest
from spmdrl.config.parameters import only_of
from spmdrl.config.paths import recorded_settings
from spmdrl.config.presets import PRESETS, settings_of_preset
from spmdrl.config.raw_settings import COMMAND_LINE, FALSE, TRUE, Entries, Given, read_yaml
from spmdrl.config.schema import OptimizerConfig

Entry = tuple[str, Given]
METHOD = ("algo.preset", "algo.loss", "algo.advantage")
"""Settings that determine which other settings a preset sets."""
SIMPO = {"preference.beta": "2.0", "preference.margin": "1.0"}
"""Defaults for SimPO. Its log-probabilities are averaged over tokens and therefore small, so the paper sets beta to 2
to 2.5 and gamma to half of beta (https://arxiv.org/abs/2405.14734)."""
ORIGIN = "a run of your own"
DEMO_LR = OptimizerConfig.lr
LR, LORA_FACTOR = 1e-6, 10
"""Default learning rate for reinforcement learning without adapters, and the factor by which it is multiplied for a run
with adapters (https://thinkingmachines.ai/blog/lora)."""
NEW_TOKENS = 1024
MANY = 1 << 30
CRITIC_LR = "1e-05"
"""Default learning rate of a critic, which is about ten times the policy's learning rate, as in verl's examples
(https://github.com/volcengine/verl)."""
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "tiny" / "config.json"
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")


@dataclass
class Begun:
    """Settings recorded in the folder of the run that this job continues. They are empty for a new run."""

    path: str = ""
    entries: dict[str, Given] = field(default_factory=dict)

    def instead_of(self, layer: Entries) -> Entries:
        """Return a layer with the values of the continued run; settings that its folder lacks are omitted.

        For a new run, the layer is returned unchanged.
        """
        return [(name, self.entries[name]) for name, _ in layer if name in self.entries] if self.entries else layer


def begun_with(given: Entries, schema: type) -> Begun:
    """Return the recorded settings of the run that this job continues. given: entries from all files and flags."""
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
        # A folder that cannot be read is refused later, when the job starts.
        return Begun()


def own_layer(given: Entries, schema: type, begun: Begun) -> tuple[Entries, tuple[str, ...]]:
    """Return the defaults for runs other than the demo, and at most one line that tells the user about them.

    given: entries from all files and flags; settings in them get no default. begun: settings of the continued run.
    """
    names, last = leaves(schema), {name: found.values or [] for name, found in given}
    data = last.get("data.train" if "data.train" in names else "data.eval", [])
    own_rows = any(data) and not all(spec.startswith("builtin:") for spec in data)
    samples_own_rows = own_rows and "rollout.max_new_tokens" in names
    path = "".join(last.get("model.path", [])[-1:])
    wanted: dict[str, str] = {}
    if samples_own_rows and "data.train" in names and "data.eval" not in last:
        wanted |= {"data.eval": ""} | ({} if "eval.every" in last else {"eval.every": "0"})
    if not is_shipped(path):
        lr = _learning_rate(last, schema)
        wanted |= {"rollout.max_new_tokens": str(min(NEW_TOKENS, context_of(path) // 2))} if samples_own_rows else {}
        wanted |= {"optimizer.lr": lr} if lr else {}
        wanted |= {"critic.lr": CRITIC_LR} if "critic.lr" in names and _has_critic(last) else {}
    unnamed = [(name, Given([value], ORIGIN)) for name, value in wanted.items() if name not in last]
    layer = begun.instead_of(unnamed)
    shown = [f"{flag(name)} {' '.join(found.values or []) or 'none'}" for name, found in layer]
    whose = f"defaults of {ORIGIN}, which differ from the demo's"
    line = f"{f'settings of {begun.path}' if begun.entries else whose}: {', '.join(shown)}"
    return layer, ((line,) if shown else ())


def _has_critic(last: dict[str, list[str]]) -> bool:
    """Return True if the chosen advantage is a built-in one that uses a critic's values."""
    preset = PRESETS.get("".join(last.get("algo.preset", [])[-1:]))
    named = last.get("algo.advantage") or ([preset.settings["algo.advantage"]] if preset else [])
    if not named:
        return False
    from spmdrl.algos.estimators import ADVANTAGES  # lazy import: needs torch

    row = ADVANTAGES.get(named[-1])
    return row is not None and "values" in row.fields


def _learning_rate(last: dict[str, list[str]], schema: type) -> str:
    """Return the default learning rate as text, or "" if it is the schema's default."""
    if "optimizer.lr" not in leaves(schema):
        return ""
    own = float(get(schema(), "optimizer.lr"))
    full = LR if own == DEMO_LR else own
    adapted = "".join(last.get("lora.rank", [])[-1:]) not in ("", "0")
    lr = full * LORA_FACTOR if adapted else full
    return "" if lr == own else f"{lr:g}"


def context_of(path: str) -> int:
    """Return the maximum sequence length, in tokens, from a model's config.json, or MANY if it cannot be read."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        lengths = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
        return min((n for n in lengths if isinstance(n, int) and n > 0), default=MANY)
    except (OSError, ValueError, AttributeError):
        return MANY


def is_shipped(path: str) -> bool:
    """Return True for the bundled model, and for a folder with a model of the same shape."""
    if path in ("", "tiny"):
        return True
    try:
        found, own = (json.loads(file.read_text(encoding="utf-8")) for file in (Path(path) / "config.json", SHIPPED))
        return all(found.get(name) == own[name] for name in SHAPE)
    except (OSError, ValueError, AttributeError):
        return False


def preset_layer(given: Entries, schema: type, problems: list[str]) -> Entries:
    """Return the settings of the last preset given, or of grpo if no preset is given. Values are text."""
    if "algo.preset" not in leaves(schema):
        return []
    named = [(found.values[0], found.origin) for name, found in given if name == "algo.preset" and found.values]
    name, origin = named[-1] if named else ("grpo", "")
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f"did you mean {near[0]}? " if near else ""
        where = "" if origin == COMMAND_LINE else f"{origin}: "
        problems.append(f"{where}--algo.preset {name}: unknown; {hint}Valid: {', '.join(PRESETS)}")
        return []
    settings = settings_of_preset(name, _last(given, "algo.loss"), _last(given, "algo.advantage"))
    return [(leaf, Given([str(value)], f"preset {name}")) for leaf, value in settings.items()]


def replaced_by_preset(layers: list[Entries], schema: type) -> list[tuple[Entry, str]]:
    """Return the entries overridden by a preset in a later layer, each with a line for the user, which can be empty.

    A preset overrides the loss, the advantage and all other settings that it sets, if they come from earlier layers. If
    the preset changes the loss (or the advantage), it also discards earlier settings in `algo` that losses (or
    advantages) read. Entries in the same layer as the preset override it.

    layers: the entries of each file, then the entries of the command line.
    """
    if "algo.preset" not in leaves(schema):
        return []
    out: list[tuple[Entry, str]] = []
    for place, layer in enumerate(layers):
        name = _last(layer, "algo.preset")
        if name not in PRESETS:
            continue
        # Do not report settings that this layer or a later one sets again.
        named_again = {leaf for left in layers[place:] for leaf, _ in left}
        earlier = [entry for left in without(layers[:place], [entry for entry, _ in out]) for entry in left]
        own = PRESETS[name].settings
        gone = {"algo.loss", "algo.advantage", *own}
        before = PRESETS.get(_last(earlier, "algo.preset") or "grpo")
        for kind in ("loss", "advantage"):
            leaf = f"algo.{kind}"
            theirs = _last(earlier, leaf) or (before.settings[leaf] if before else "")
            if theirs != (_last(layer, leaf) or own[leaf]):
                gone |= only_of(kind)
        origin = dict(layer)["algo.preset"].origin
        for leaf, given in (entry for entry in earlier if entry[0] in gone):
            value = " ".join(given.values or ["null"])
            line = f"--algo.preset {name} ({origin}) replaces {leaf} {value} of {given.origin}"
            out.append(((leaf, given), "" if leaf in named_again or _has_value(given, own.get(leaf)) else line))
    return out


def without(layers: list[Entries], dropped: Entries) -> list[Entries]:
    """Return the layers without the entries in `dropped`."""
    return [[entry for entry in layer if not any(entry[1] is given for _, given in dropped)] for layer in layers]


def implied_by_preset(found: Entries, every: Entries, schema: type) -> Entries:
    """Return the method entries in a run's config.yaml whose value is merely the preset's value or the default.

    Such entries must not override a newly chosen method. If preset, loss and advantage are unchanged, none are
    returned.
    found: the file's entries. every: entries from all files and flags.
    """
    theirs, chosen = ([_last(given, name) for name in METHOD] for given in (found, every))
    if "algo.preset" not in leaves(schema) or theirs == chosen or not all(theirs) or theirs[0] not in PRESETS:
        return []
    own = settings_of_preset(*theirs)
    names = {*own, *METHOD, *only_of("loss"), *only_of("advantage")}
    if chosen[0] in PRESETS:
        names |= PRESETS[chosen[0]].settings.keys()
    plain = schema()
    return [
        entry
        for entry in found
        if entry[0] in names - {"algo.preset"} and _has_value(entry[1], own.get(entry[0], get(plain, entry[0])))
    ]


def _has_value(given: Given, value: Any) -> bool:
    if given.values is None or value is None:
        return given.values is None and value is None
    if isinstance(value, tuple):
        return given.values == [str(item) for item in value]
    word = given.values[0] if len(given.values) == 1 else ""
    if isinstance(value, bool):
        return word.lower() in (TRUE if value else FALSE)
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _last(given: Entries, name: str) -> str:
    """Return the last value given for a setting (its first word), or "" if there is none."""
    return next((found.values[0] for leaf, found in given[::-1] if leaf == name and found.values), "")


def implied_layer(given: Entries, schema: type, begun: Begun) -> Entries:
    """Return values implied by other settings: static assignment for `--run.deterministic`, and SimPO's defaults.

    given: entries from all files and flags. begun: settings of the continued run.
    """
    on, names = False, leaves(schema)
    for name, found in given:
        if name in ("run.deterministic", "run.no_deterministic"):
            yes = (found.values or ["true"])[0].lower() in TRUE
            on = yes if name == "run.deterministic" else not yes
    out: Entries = []
    if on and "rollout.assignment" in names:
        out.append(("rollout.assignment", Given(["static"], flag("run.deterministic"))))
    losses = next((found.values for name, found in given[::-1] if name == "preference.loss" and found.values), None)
    kinds = [loss.partition("=")[0] for loss in losses or [_last(given, "preference.method")]]
    if "preference.margin" in names and kinds == ["simpo"]:
        out += begun.instead_of([(name, Given([value], "simpo")) for name, value in SIMPO.items()])
    return out
