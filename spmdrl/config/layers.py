"""Layers of settings below those of files and flags: the values of a preset, and those that another setting implies."""

from typing import Any

from spmdrl.config.begun import Begun
from spmdrl.config.fields import flag, get, leaves, nearest
from spmdrl.config.given import COMMAND_LINE, FALSE, TRUE, Entries, Given
from spmdrl.config.parameters import only_of
from spmdrl.config.presets import PRESETS, settings_of_preset

Entry = tuple[str, Given]
SIMPO = {"preference.beta": "2.0", "preference.margin": "1.0"}
"""SimPO compares means over tokens, which are small: beta 2 to 2.5, gamma half of it (https://arxiv.org/abs/2405.14734)."""


def preset_layer(given: Entries, schema: type, problems: list[str]) -> Entries:
    """The settings of the preset that was named last, as text."""
    named = [found for name, found in given if name == "algo.preset" and found.values]
    name = named[-1].values[0] if named and named[-1].values else "grpo"
    if "algo.preset" not in leaves(schema):
        return []
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f"did you mean {near[0]}? " if near else ""
        where = "" if named[-1].origin == COMMAND_LINE else f"{named[-1].origin}: "
        problems.append(f"{where}--algo.preset {name}: unknown; {hint}Valid: {', '.join(PRESETS)}")
        return []
    chosen = {leaf: found[-1] for leaf in ("algo.loss", "algo.advantage") if (found := _words(given, leaf))}
    settings = settings_of_preset(name, **{leaf.partition(".")[2]: word for leaf, word in chosen.items()})
    return [(leaf, Given([str(value)], f"preset {name}")) for leaf, value in settings.items()]


METHOD = ("algo.preset", "algo.loss", "algo.advantage")
"""Settings that decide which others a preset sets."""


def replaced_by_preset(layers: list[Entries], schema: type) -> list[tuple[Entry, str]]:
    """Entries of a layer that the preset of a later layer replaces, each with a line about it or "" where none is due.

    A preset replaces the loss, the advantage and every setting of its own that earlier layers name, and what only the
    functions read that it replaces. In its own layer it stands below the other entries.

    layers: the entries of each file, then those of the command line.
    """
    if "algo.preset" not in leaves(schema):
        return []
    out: list[tuple[Entry, str]] = []
    for place, layer in enumerate(layers):
        found = [given for name, given in layer if name == "algo.preset" and given.values]
        name = found[-1].values[0] if found and found[-1].values else ""
        if name not in PRESETS:
            continue
        # Of a setting that is named again the preset decides nothing.
        named_again = {leaf for left in layers[place:] for leaf, _ in left}
        earlier = [entry for left in without(layers[:place], [entry for entry, _ in out]) for entry in left]
        own = PRESETS[name].settings
        gone = {"algo.loss", "algo.advantage", *own}
        before = PRESETS.get("".join(_words(earlier, "algo.preset")[-1:]) or "grpo")
        for kind in ("loss", "advantage"):
            leaf = f"algo.{kind}"
            theirs = _words(earlier, leaf) or ([before.settings[leaf]] if before else [])
            ours = _words(layer, leaf) or [own[leaf]]
            if theirs[-1:] != ours[-1:]:
                gone |= only_of(kind)
        for entry in earlier:
            leaf, given = entry
            if leaf in gone:
                value = " ".join(given.values or ["null"])
                line = f"--algo.preset {name} ({found[-1].origin}) replaces {leaf} {value} of {given.origin}"
                out.append((entry, "" if leaf in named_again or _says(given, own.get(leaf)) else line))
    return out


def without(layers: list[Entries], dropped: Entries) -> list[Entries]:
    """The layers without some of their entries."""
    return [[entry for entry in layer if not any(entry is other for other in dropped)] for layer in layers]


def implied_by_preset(found: Entries, every: Entries, schema: type) -> Entries:
    """Entries of a resolved file that repeat its preset's values, where another method is chosen over the file's.

    found: the file's entries; every: those of all files and flags.
    """
    theirs, chosen = ({name: _words(given, name)[-1:] for name in METHOD} for given in (found, every))
    if "algo.preset" not in leaves(schema) or theirs == chosen or not all(theirs.values()):
        return []
    (preset,), (loss,), (advantage,) = theirs.values()
    if preset not in PRESETS:
        return []
    own = settings_of_preset(preset, loss, advantage)
    names = {*own, *METHOD, *only_of("loss"), *only_of("advantage")}
    if chosen["algo.preset"] and chosen["algo.preset"][0] in PRESETS:
        names |= PRESETS[chosen["algo.preset"][0]].settings.keys()
    plain = schema()
    return [
        entry
        for entry in found
        if entry[0] in names and entry[0] != "algo.preset" and _says(entry[1], own.get(entry[0], get(plain, entry[0])))
    ]


def _says(given: Given, value: Any) -> bool:
    """True where the text stands for the value."""
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


def _words(given: Entries, name: str) -> list[str]:
    """The single words given for a setting, in their order."""
    return [found.values[0] for leaf, found in given if leaf == name and found.values]


def implied_layer(given: Entries, schema: type, begun: Begun) -> Entries:
    """Settings that others imply: `--run.deterministic` a static assignment, which `checks.py` wants; SimPO its scale.

    Files and flags beat them. begun: of the run folder.
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
    kinds = [loss.partition("=")[0] for loss in losses or _words(given, "preference.method")[-1:]]
    if "preference.margin" in names and kinds == ["simpo"]:
        out += begun.instead_of([(name, Given([value], "simpo")) for name, value in SIMPO.items()])
    return out
