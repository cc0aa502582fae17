"""Writes the parts of README.md and docs/ that the code declares: python docs/generate.py

A part stands between the comments `generated: NAME` and `end of NAME`; NAME is a key of PARTS. A block of code below a
comment `file: recipes/...` is that file. A test compares every
page with what stands here (tests/unit/test_docs_generated.py).
"""

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.losses import LOSSES
from spmdrl.algos.preference import LOSSES as PREFERENCE_LOSSES
from spmdrl.algos.rows import settings_of
from spmdrl.config.builtin import REWARDS
from spmdrl.config.declare import declared
from spmdrl.config.fields import flag, get, is_optional, is_tuple, leaves, shown
from spmdrl.config.load import from_command_line
from spmdrl.config.parameters import parameters_of, read_by
from spmdrl.config.preference import METHODS
from spmdrl.config.presets import PRESETS
from spmdrl.config.use import changed, in_words, is_read, leaves_of_functions, single_changes, ways, would_read
from spmdrl.env.call_formats import FORMATS
from spmdrl.env.forms import BUILTIN
from spmdrl.session.job import jobs
from spmdrl.train import train

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDTH = 128


def filled(text: str, indent: str = "") -> str:
    """Returns a paragraph as lines of a page; indent: before the second line and those after it."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )


def table(*rows: list[str]) -> str:
    """Returns a table; the first row is its head."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def names(found: list[str], page: str = "") -> str:
    """Returns names as links to their sections, with commas between them."""
    return ", ".join(f"[`{name}`]({page}#{name})" for name in found)


# ── functions of algos/ ──────────────────────────────────────────────────────


def section(name: str, function: Callable, known: dict, more: list[str]) -> str:
    """Returns the section of a loss or an advantage: its docstring, its settings, and more lines.

    known: the rows of its kind; a name of them in the text becomes a link.
    """
    title, *rest = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    formulas = [textwrap.dedent(part) for part in rest if part.startswith("    ")]
    source, *prose = [" ".join(part.split()) for part in rest if not part.startswith("    ")]
    lines = [f"{title.rstrip('.')}. {source}.", *prose, settings(function), *more]
    lines = [linked(line, {other for other in known if other != name}) for line in lines]
    code = [f"```text\n{formula}\n```\n" for formula in formulas]
    return "\n".join([f"### `{name}`\n", *code, *(filled(f"- {line}", "  ") for line in lines)])


def linked(text: str, known: set[str]) -> str:
    """Returns a text of a docstring in which names of rows and places in docs/ are links."""
    text = re.sub(r"`(\w+)`", lambda m: f"[`{m[1]}`](#{m[1]})" if m[1] in known else m[0], text)
    return re.sub(r"\bdocs/((\w+\.md)(?:#[\w-]+)?)", r"[\2](\1)", text)


def settings(function: Callable) -> str:
    """Returns the line of a function's settings: their defaults, and the flag of each that has another name."""
    flags, shown = parameters_of(function), []
    for name, default in settings_of(function).items():
        setting = flags.get(name, "")
        other = f" (`--{setting.replace('_', '-')}`)" if setting not in ("", f"algo.{name}") else ""
        shown.append(f"`{name}` = {default!r}{other}" + ("" if setting else " `+`"))
    return f"Settings: {', '.join(shown) or 'none'}."


def losses() -> str:
    """Returns the sections of the losses."""
    parts = []
    for name, loss in LOSSES.items():
        always = ", always" if loss.scope == "one per sequence" else ""
        more = [f"Paper's aggregation: `{loss.aggregation}`{always}."]
        more += [] if loss.skips else ["`--algo.skip-zero-advantage` is refused."]
        parts.append(section(name, loss.function, LOSSES, [" ".join(more)]))
    return "\n\n".join(parts)


def advantages() -> str:
    """Returns the sections of the advantages."""
    return "\n\n".join(section(name, row.function, ADVANTAGES, []) for name, row in ADVANTAGES.items())


def advantages_by_group() -> str:
    """Returns the names of the advantages that compare the samples of a group, and of the others."""
    compare, others = ([name for name, row in ADVANTAGES.items() if row.compares == wanted] for wanted in (True, False))
    return filled(
        f"Estimators that compare the samples of a group: {names(compare)}. Estimators that do not: {names(others)}."
    )


# ── preference learning ──────────────────────────────────────────────────────


def methods_of_preference() -> str:
    """Returns the table of published methods of preference learning."""
    rows = ([f"`{name}`", ", ".join(f"`{each}`" for each in row.losses), row.paper] for name, row in METHODS.items())
    return table(["method", "losses", "paper"], *rows)


def losses_of_preference() -> str:
    """Returns the table of losses of pairs and of labelled responses: of each the first paragraph of its docstring."""
    rows = []
    for name, loss in PREFERENCE_LOSSES.items():
        says = " ".join(inspect.cleandoc(loss.function.__doc__ or "").split("\n\n")[0].split())
        read = ", ".join(f"`{setting}`" for setting in loss.reads)
        rows.append([f"`{name}`", says, "labelled" if loss.labelled else "pairs", read])
    return table(["loss", "is", "of", "settings"], *rows)


# ── presets ──────────────────────────────────────────────────────────────────


def recipes() -> dict[str, list[str]]:
    """Returns preset -> folders of recipes/ that train with it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "recipes").glob("*/*.yaml")):
        jobs = re.findall(r"-m spmdrl\.(\w+)", path.read_text(encoding="utf-8"))
        if not path.name.startswith("demo") and jobs[-1:] == ["train"]:
            with contextlib.chdir(ROOT):
                preset = from_command_line(["--config", str(path)]).config.algo.preset
            if path.parent.name not in found.setdefault(preset, []):
                found[preset].append(path.parent.name)
    return found


def presets() -> str:
    """Returns the table of presets."""
    by_preset, rows = recipes(), []
    fixed = ("algo.advantage", "algo.loss", "algo.aggregation")
    for name, preset in PRESETS.items():
        advantage, loss, aggregation = (preset.settings[leaf] for leaf in fixed)
        also = {leaf.removeprefix("algo."): value for leaf, value in preset.settings.items() if leaf not in fixed}
        rows.append(
            [
                f"`{name}`",
                f"[{preset.title}]({preset.paper})",
                names([advantage], "advantages.md"),
                names([loss], "losses.md"),
                f"`{aggregation}`",
                ", ".join(f"`{leaf}` {value}" for leaf, value in also.items()),
                ", ".join(f"[{recipe}](../recipes/{recipe}/README.md)" for recipe in by_preset.get(name, [])),
            ]
        )
    return table(["preset", "paper", "advantage", "loss", "aggregation", "also sets", "recipe"], *rows)


def preset_names() -> str:
    """Returns README's list of presets."""
    return filled(f"{len(PRESETS)} presets: " + ", ".join(f"`{name}`" for name in PRESETS) + ".")


# ── rewards ──────────────────────────────────────────────────────────────────


def rewards() -> str:
    """Returns the table of built-in rewards: of each the first paragraph of its docstring."""
    rows: dict[str, str] = {}
    for name, row in REWARDS.items():
        documented = getattr(import_module(f"spmdrl.rewards.{row.module}"), row.documented or name)
        says = " ".join(inspect.cleandoc(documented.__doc__).split("\n\n")[0].split())
        rows[says] = f"{rows[says]}, `{name}`" if says in rows else f"`{name}`"
    return table(["reward", "score and parts"], *([found, linked(says, set())] for says, found in rows.items()))


# ── the loop ─────────────────────────────────────────────────────────────────


def loop() -> str:
    """Returns the function `train` of train.py without its docstring and its imports."""
    code = inspect.getsource(train)
    kept = [line for line in code.splitlines() if line.strip() and not re.match(r'    (from |""")', line)]
    return "\n".join(["```python", *kept, "```"])


# ── environments ─────────────────────────────────────────────────────────────


def environments() -> str:
    """Returns the table of built-in environments: their docstrings, and the settings of their classes."""
    rows = []
    for name, place in BUILTIN.items():
        module, _, attribute = place.partition(":")
        kind = getattr(import_module(module), attribute)
        says = " ".join(inspect.cleandoc(kind.__doc__).split())
        rows.append([f"`builtin:{name}`", linked(says, set()), arguments(kind)])
    return table(["value", "environment", "settings"], *rows)


def arguments(kind: type) -> str:
    """Returns the settings of a class: the defaults in its signature, and the lines under `Args:` of `__init__`."""
    block = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(kind.__init__.__doc__ or ""), re.DOTALL)
    told = dict(re.findall(r"^    (\w+): (.*?)(?=\n    \w|\Z)", block[1] if block else "", re.MULTILINE | re.DOTALL))
    found = []
    for name, parameter in inspect.signature(kind).parameters.items():
        says = " ".join(told.get(name, "").split()).rstrip(".")
        empty = parameter.default in (None, "", (), False)
        found.append(f"`{name}`{'' if empty else f' ({parameter.default})'}" + (f": {says}" if says else ""))
    return "; ".join(found)


def forms_of_calls() -> str:
    """Returns the table of forms of tool calls: the two paragraphs of their readers' docstrings."""
    rows = []
    for name, form in FORMATS.items():
        text = inspect.cleandoc(form.read.__doc__ or "").replace("|", "\\|")
        reads, _, source = (" ".join(part.split()) for part in text.partition("\n\n"))
        rows.append([f"`{name}`", reads.removeprefix("Read ").rstrip("."), source.rstrip(".")])
    return table(["form", "a call", "models, source"], *rows)


def kinds_of_jobs() -> str:
    """Returns the table of entry points; the first words of their docstrings say what they do."""
    rows = []
    for module, job in jobs().items():
        does = (import_module(module).__doc__ or "").partition(":")[0]
        rows.append([f"`{module}`", " ".join(does.split()), f"[{job.page}]({job.page})"])
    return table(["command", "what it does", "page"], *rows)


# ── settings ─────────────────────────────────────────────────────────────────


def all_settings() -> str:
    """Returns a table of each section's settings: what their fields declare, over all commands."""
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for module, job in jobs().items():
        for name in leaves(job.settings):
            row = (name, *declarations(job.settings, name))
            rows.setdefault(name.rpartition(".")[0], {}).setdefault(row, []).append(module.removeprefix("spmdrl."))
    parts = []
    for group in sorted(rows):
        commands = list(dict.fromkeys(command for found in rows[group].values() for command in found))
        # Rows of one setting that differ between commands stand together.
        order = list(dict.fromkeys(row[0] for row in rows[group]))
        found = [
            [f"`{flag(name)}`", *cells, "" if len(found) == len(commands) else ", ".join(found)]
            for (name, *cells), found in sorted(rows[group].items(), key=lambda row: order.index(row[0][0]))
        ]
        head = ["setting", "default", "values", "read with", "resume", "only in"]
        parts.append(f"## {group or 'without a section'}\n\nIn {', '.join(commands)}.\n\n{table(head, *found)}")
    return "\n\n".join(parts)


def declarations(schema: type, name: str) -> tuple[str, str, str, str]:
    """Returns default, values, conditions and resume of a setting of a command, as cells of a table."""
    config, hint, declares = schema(), leaves(schema)[name], declared(schema)[name]
    value = get(config, name)
    says = re.sub("^must (be|lie) ", "", declares.rule.says) if declares.rule else ""
    default = "" if value in ("", ()) else f"`{shown(value)}`".replace("|", "\\|")
    return default, ", ".join(filter(None, [kind(hint), says])), conditions(config, name), "free" * bool(declares.free)


def kind(hint: Any) -> str:
    """Returns what a type takes: `auto` or `on`, a number, words."""
    if get_origin(hint) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint))
    if is_optional(hint):
        return f"{' or '.join(kind(each) for each in get_args(hint) if each is not type(None))} or None"
    if is_tuple(hint):
        return "words" if str in get_args(hint) else "numbers"
    return {str: "text", int: "integer", float: "number", bool: "yes or no"}[hint]


def conditions(config: Any, name: str) -> str:
    """Returns the changes of other settings with which a run, by default, would read a setting; or would not."""
    if name in leaves_of_functions(type(config)):
        tables = {"algo.loss": LOSSES, "algo.advantage": ADVANTAGES}
        readers = {of: [each for each, row in rows.items() if name in read_by(row)] for of, rows in tables.items()}
        return " or ".join(f"`{flag(of)}` {', '.join(found)}" for of, found in readers.items() if found)
    if declared(type(config))[name].only_with is None:
        return ""
    if not would_read(config, name):
        return "; ".join(f"`{each}`" for each in ways(config, name)).replace("|", "\\|")
    stopping: dict[str, list[Any]] = {}
    for other, value in [*turned_off(config), *single_changes(config)]:
        if other != name and stops(config, other, value, name):
            stopping.setdefault(other, []).append(value)
    found = "; ".join(f"`{in_words(*change)}`" for change in stopping.items()).replace("|", "\\|")
    return f"not {found}" if found else ""


def turned_off(config: Any) -> list[tuple[str, Any]]:
    """Returns changes of settings to a value that stands for none."""
    off: dict[Any, Any] = {str: "", int: 0, float: 0.0}
    hints = {name: hint for name, hint in leaves(type(config)).items() if hint in off}
    return [(name, off[hint]) for name, hint in hints.items() if get(config, name) != off[hint]]


def stops(config: Any, other: str, value: Any, name: str) -> bool:
    """Tells whether a change of another setting, after which the run can be composed, leaves a setting unread."""
    try:
        return not is_read(changed(config, other, value), name)
    except (ValueError, KeyError):
        return False


PARTS: dict[str, Callable[[], str]] = {
    "loop of train.py": loop,
    "jobs": kinds_of_jobs,
    "losses": losses,
    "advantages": advantages,
    "advantages by group": advantages_by_group,
    "presets": presets,
    "names of presets": preset_names,
    "rewards": rewards,
    "methods of preference": methods_of_preference,
    "losses of preference": losses_of_preference,
    "settings": all_settings,
    "environments": environments,
    "forms of calls": forms_of_calls,
}


def generated(text: str) -> str:
    """Returns the text of a page with its parts as the code declares them, and with blocks of code as in their files.

    Raises:
        KeyError: a part that is no key of PARTS.
    """
    text = re.sub(
        r"(<!-- file: (recipes/\S+) -->\n```python\n).*?(```)",
        lambda found: f"{found[1]}{(ROOT / found[2]).read_text(encoding='utf-8')}{found[3]}",
        text,
        flags=re.DOTALL,
    )
    return re.sub(
        r"(<!-- generated: ([^>]+) -->\n).*?(<!-- end of \2 -->)",
        lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := generated(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
