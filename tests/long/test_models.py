"""Every family of models trains and samples right, or is refused by name; none is silently wrong.

Writes docs/results/models.json, and from it the table of docs/models.md, for the families that were asked for:

    pytest tests/long/test_models.py                    all families, about an hour
    pytest tests/long/test_models.py -k "lfm2 or llama"

Each family is a tiny random model (`families.py`). `family_probe.py` writes down a run of RL on it by the HF engine, by
vLLM, and with adapters; `family_checks.py` compares all numbers with plain transformers, one sequence at a time.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spmdrl.policy.megatron.families import FAMILIES as CONVERTED
from tests.builds import no_vllm
from tests.engines.families import FAMILIES, make
from tests.engines.family_checks import checked, reference_logp
from tests.long.family_ranks import critic_error, ulysses_error
from tests.long.model_table import ROOT, check, keep

pytestmark = pytest.mark.timeout(7200)
RESULTS, BEGIN = ROOT / "docs" / "results" / "models.json", "<!-- table of families -->"
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
    keep(found, RESULTS, BEGIN, list(FAMILIES))
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
    check(rows[name])


def test_at_least_45_families_train_and_sample_right(rows):
    if len(rows) < len(FAMILIES):
        pytest.skip("only some families were asked for")
    assert sum(green(row) for row in rows.values()) >= 45


def green(row: dict[str, Any]) -> bool:
    """Tell whether a family trains, exports and samples right by the HF engine, or by vLLM."""
    return any(run in row and not row[run]["error"] and not row[run]["wrong"] for run in ("hf", "vllm"))
