"""Writes the parts of README.md and docs/ that the code declares: python docs/generate.py

A part stands between the comments `generated: NAME` and `end of NAME`; NAME is a key of PARTS. A test compares every
page with what stands here (tests/unit/test_docs_generated.py).
"""

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.losses import LOSSES
from spmdrl.algos.rows import settings_of
from spmdrl.config.builtin import REWARDS
from spmdrl.config.load import from_command_line
from spmdrl.config.parameters import parameters_of
from spmdrl.config.presets import PRESETS
from spmdrl.env.call_formats import FORMATS
from spmdrl.env.forms import BUILTIN
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


PARTS: dict[str, Callable[[], str]] = {
    "loop of train.py": loop,
    "losses": losses,
    "advantages": advantages,
    "advantages by group": advantages_by_group,
    "presets": presets,
    "names of presets": preset_names,
    "rewards": rewards,
    "environments": environments,
    "forms of calls": forms_of_calls,
}


def generated(text: str) -> str:
    """Returns the text of a page with its parts as the code declares them.

    Raises:
        KeyError: a part that is no key of PARTS.
    """
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
