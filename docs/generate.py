"""Writes the parts of README.md and docs/ that are generated from the code: python docs/generate.py

A part is between the comments `generated: NAME` and `end of NAME`, where NAME is a key of PARTS. A block of code below
a comment `file: recipes/...` is a copy of that file. A test compares all pages with the result of this program
(tests/unit/test_docs_generated.py). The tables of methods and settings are in `doctables/`.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from doctables import methods
from doctables.settings import all_settings
from doctables.text import filled, linked, names, paragraphs, table

from spmdrl.config.builtin import REWARDS
from spmdrl.config.load import from_command_line
from spmdrl.config.presets import PRESETS
from spmdrl.env.call_formats import FORMATS
from spmdrl.env.forms import BUILTIN
from spmdrl.session.job import jobs
from spmdrl.train import train

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def recipes() -> dict[str, list[str]]:
    """Return a dict of preset -> folders of recipes/ that train with it."""
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
    """Return the table of presets."""
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
    """Return README's list of presets."""
    return filled(f"{len(PRESETS)} presets: " + ", ".join(f"`{name}`" for name in PRESETS) + ".")


def rewards() -> str:
    """Return the table of built-in rewards, with the first paragraph of each docstring."""
    rows: dict[str, str] = {}
    for name, row in REWARDS.items():
        documented = getattr(import_module(f"spmdrl.rewards.{row.module}"), row.documented or name)
        text = paragraphs(documented)[0]
        rows[text] = f"{rows[text]}, `{name}`" if text in rows else f"`{name}`"
    return table(["reward", "score and parts"], *([found, linked(text, set())] for text, found in rows.items()))


def loop() -> str:
    """Return the source of the function `train` of train.py, without its docstring and imports."""
    code = inspect.getsource(train)
    kept = [line for line in code.splitlines() if line.strip() and not re.match(r'    (from |""")', line)]
    return "\n".join(["```python", *kept, "```"])


def environments() -> str:
    """Return the table of built-in environments, with the docstrings and the settings of their classes."""
    rows = []
    for name, place in BUILTIN.items():
        module, _, attribute = place.partition(":")
        kind = getattr(import_module(module), attribute)
        text = " ".join(inspect.cleandoc(kind.__doc__).split())
        rows.append([f"`builtin:{name}`", linked(text, set()), arguments(kind)])
    return table(["value", "environment", "settings"], *rows)


def arguments(kind: type) -> str:
    """Return the settings of a class, with defaults from its signature and descriptions from `Args:` of `__init__`."""
    block = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(kind.__init__.__doc__ or ""), re.DOTALL)
    described = dict(
        re.findall(r"^    (\w+): (.*?)(?=\n    \w|\Z)", block[1] if block else "", re.MULTILINE | re.DOTALL)
    )
    found = []
    for name, parameter in inspect.signature(kind).parameters.items():
        text = " ".join(described.get(name, "").split()).rstrip(".")
        empty = parameter.default in (None, "", (), False)
        found.append(f"`{name}`{'' if empty else f' ({parameter.default})'}" + (f": {text}" if text else ""))
    return "; ".join(found)


def forms_of_calls() -> str:
    """Return the table of formats of tool calls, from the two paragraphs of the docstrings of their readers."""
    rows = []
    for name, form in FORMATS.items():
        text = inspect.cleandoc(form.read.__doc__ or "").replace("|", "\\|")
        reads, _, source = (" ".join(part.split()) for part in text.partition("\n\n"))
        rows.append([f"`{name}`", reads.removeprefix("Read ").rstrip("."), source.rstrip(".")])
    return table(["form", "a call", "models, source"], *rows)


def kinds_of_jobs() -> str:
    """Return the table of entry points, with the text before the first colon of their docstrings."""
    rows = []
    for module, job in jobs().items():
        does = (import_module(module).__doc__ or "").partition(":")[0]
        rows.append([f"`{module}`", " ".join(does.split()), f"[{job.page}]({job.page})"])
    return table(["command", "what it does", "page"], *rows)


PARTS: dict[str, Callable[[], str]] = {
    "loop of train.py": loop,
    "jobs": kinds_of_jobs,
    "losses": methods.losses,
    "evidence of losses": methods.evidence_of_losses,
    "advantages": methods.advantages,
    "advantages by group": methods.advantages_by_group,
    "evidence of advantages": methods.evidence_of_advantages,
    "gradients": methods.gradients,
    "estimates of KL": methods.kl_kinds,
    "corrections": methods.corrections,
    "filters": methods.filters,
    "resampling": methods.resampling,
    "presets": presets,
    "names of presets": preset_names,
    "rewards": rewards,
    "methods of preference": methods.methods_of_preference,
    "losses of preference": methods.losses_of_preference,
    "settings": all_settings,
    "environments": environments,
    "forms of calls": forms_of_calls,
}


def generated(text: str) -> str:
    """Return the text of a page in which the generated parts and the copies of files are up to date.

    Raises:
        KeyError: the page names a part that is not a key of PARTS.
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
