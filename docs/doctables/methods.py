"""Sections and tables of docs/ about functions of algos/: losses, advantages, KL, correction, filters, preference."""

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from doctables.text import filled, linked, names, paragraphs, table

from spmdrl.algos.correction import CORRECTIONS
from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.filters import FILTERS
from spmdrl.algos.kl import KL_KINDS
from spmdrl.algos.losses import LOSSES
from spmdrl.algos.preference import LOSSES as PREFERENCE_LOSSES
from spmdrl.algos.resample import METHODS as RESAMPLING
from spmdrl.algos.rows import paper_of, settings_of
from spmdrl.config.parameters import parameters_of
from spmdrl.config.preference import METHODS

GRADIENTS = {
    "exact": "equal to 1e-10",
    "scaled": "1 - 1/n of the exact gradient, if the mean of n samples is subtracted; the direction is right",
    "biased": "another direction, even on average",
}
"""Classes of the expected policy gradient of an advantage, and their meanings."""
OF_ERRORS = re.compile("wrong|refuse|out_of_range|broken")
"""Pattern in the names of tests that test error messages."""
TESTS = Path(__file__).resolve().parents[2] / "tests" / "unit"


def section(name: str, function: Callable, known: dict, more: list[str]) -> str:
    """Return the section of a loss or an advantage: its docstring, its settings, and the lines of `more`.

    known: the table of all losses or all advantages. Their names in the text become links.
    """
    title, *rest = paragraphs(function)
    formulas = [textwrap.dedent(part) for part in rest if part.startswith("    ")]
    source, *prose = [part for part in rest if not part.startswith("    ")]
    lines = [f"{title.rstrip('.')}. {source}.", *prose, settings(function), *more]
    lines = [linked(line, {other for other in known if other != name}) for line in lines]
    code = [f"```text\n{formula}\n```\n" for formula in formulas]
    return "\n".join([f"### `{name}`\n", *code, *(filled(f"- {line}", "  ") for line in lines)])


def settings(function: Callable) -> str:
    """Return a line with the settings of a function, their defaults, and flags that differ from the setting's name."""
    flags, shown = parameters_of(function), []
    for name, default in settings_of(function).items():
        setting = flags.get(name, "")
        other = f" (`--{setting.replace('_', '-')}`)" if setting not in ("", f"algo.{name}") else ""
        shown.append(f"`{name}` = {default!r}{other}" + ("" if setting else " `+`"))
    return f"Settings: {', '.join(shown) or 'none'}."


def losses() -> str:
    """Return the sections of the losses."""
    parts = []
    for name, loss in LOSSES.items():
        always = ", always" if loss.scope == "one per sequence" else ""
        more = [f"Paper's aggregation: `{loss.aggregation}`{always}."]
        more += [] if loss.skips else ["`--algo.skip-zero-advantage` is refused."]
        parts.append(section(name, loss.function, LOSSES, [" ".join(more)]))
    return "\n\n".join(parts)


def advantages() -> str:
    """Return the sections of the advantages."""
    return "\n\n".join(section(name, row.function, ADVANTAGES, []) for name, row in ADVANTAGES.items())


def advantages_by_group() -> str:
    """Return the names of the advantages that compare the samples of a group, and of the others."""
    compare, others = ([name for name, row in ADVANTAGES.items() if row.compares == wanted] for wanted in (True, False))
    return filled(
        f"Estimators that compare the samples of a group: {names(compare)}. Estimators that do not: {names(others)}."
    )


def gradients() -> str:
    """Return a list of the classes of the expected policy gradient, with the advantages of each class."""
    found = {kind: [name for name, row in ADVANTAGES.items() if row.gradient == kind] for kind in GRADIENTS}
    return "\n".join(
        filled(f"- *{kind}*, {text}: {names(found[kind], 'advantages.md')}.", "  ") for kind, text in GRADIENTS.items()
    )


# ── evidence ─────────────────────────────────────────────────────────────────


def evidence(rows: dict, *files: str) -> str:
    """Return a table of the tests of each function: golden entries, then tests that have its name as a constant, or as
    a key of a dict of their module.

    rows: the functions by name. files: modules of tests/unit. ENTRIES of the first module maps golden entries to
    functions.
    """
    golden: dict[str, list[str]] = {}
    tests: dict[str, list[str]] = {}
    for file in files:
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        dicts = {
            ast.unparse(node.targets[0]): node.value
            for node in body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        }
        entries = dicts.pop("ENTRIES", None) if file == files[0] else None
        for entry, value in zip(entries.keys, entries.values, strict=True) if entries else ():
            golden.setdefault(value.elts[0].value, []).append(f"golden `{ast.literal_eval(entry)}`")  # type: ignore
        keys = {name: {key.value for key in node.keys if isinstance(key, ast.Constant)} for name, node in dicts.items()}
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not OF_ERRORS.search(node.name):
                parts = list(ast.walk(node))
                words = {each.value for each in parts if isinstance(each, ast.Constant)}
                words = words.union(*(keys.get(each.id, ()) for each in parts if isinstance(each, ast.Name)))
                for name in rows.keys() & words:
                    tests.setdefault(name, []).append(f"`tests/unit/{file}::{node.name}`")
    return table(
        ["function", "test"], *([f"`{name}`", ", ".join(golden.get(name, []) + tests.get(name, []))] for name in rows)
    )


def evidence_of_advantages() -> str:
    """Return the table of the tests of each advantage."""
    return evidence(ADVANTAGES, "test_advantages.py", "test_turn_credit.py")


def evidence_of_losses() -> str:
    """Return the table of the tests of each loss."""
    return evidence(LOSSES, "test_losses.py", "test_selection.py")


# ── KL, correction, filters ──────────────────────────────────────────────────


def kl_kinds() -> str:
    """Return the table of KL estimates, from the two paragraphs of the docstrings of their functions."""
    rows = []
    for name, function in KL_KINDS.items():
        text, form = paragraphs(function)
        value, gradient = re.fullmatch(r"value: (.*); gradient: (.*)", form.replace("|", "\\|")).groups()  # type: ignore
        rows.append([f"`{name}`", f"`{value}`", f"`{gradient}`", text.replace("||", "\\|\\|")])
    return table(["kind", "value", "gradient with respect to logp", "as an estimate"], *rows)


def corrections() -> str:
    """Return the table of rollout corrections."""
    rows = []
    for name, row in CORRECTIONS.items():
        bounds = settings_of(row.function)
        shown = ", ".join("-" if bounds.get(bound) is None else f"{bounds[bound]:g}" for bound in ("low", "high"))
        text = paragraphs(row.function)[0].rstrip(".") + ("; `r` is the sequence's" if row.of_sequence else "")
        rows.append([f"`{name}`", text, shown if bounds else "", paper_of(row.function)])
    return table(["kind", "weight", "`low`, `high`", "source"], *rows)


def filters() -> str:
    """Return the table of filters."""
    rows = []
    for name, function in FILTERS.items():
        text, source, *_ = paragraphs(function)
        bounds = ", ".join(f"`--filter.{leaf}` {value}" for leaf, value in settings_of(function).items())
        rows.append([f"`{name}`", text, bounds, source.removeprefix("Source: ")])
    return table(["name", "keeps", "settings", "source"], *rows)


def resampling() -> str:
    """Return the table of the weights of resampling."""
    return table(
        ["method", "weight of a sequence"],
        *([f"`{name}`", paragraphs(f)[0].replace("|", "\\|")] for name, f in RESAMPLING.items()),
    )


# ── preference learning ──────────────────────────────────────────────────────


def methods_of_preference() -> str:
    """Return the table of published methods of preference learning."""
    rows = ([f"`{name}`", ", ".join(f"`{each}`" for each in row.losses), row.paper] for name, row in METHODS.items())
    return table(["method", "losses", "paper"], *rows)


def losses_of_preference() -> str:
    """Return the table of losses of pairs and of labelled responses, with the first paragraph of each docstring."""
    rows = []
    for name, loss in PREFERENCE_LOSSES.items():
        text = paragraphs(loss.function)[0].replace("|", "\\|")
        read = ", ".join(f"`{setting}`" for setting in loss.reads)
        rows.append([f"`{name}`", text, "labelled" if loss.labelled else "pairs", read])
    return table(["loss", "is", "of", "settings"], *rows)
