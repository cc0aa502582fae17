"""Every fault in every phase in which it can happen: the long form of tests/e2e/test_faults.py.

As a program it runs all of them and prints the rows of docs/reliability.md, and a record as JSON:
`python -m tests.long.test_faults RECORD.json`.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.faults import FAULTS, TIMEOUT, run_fault
from tests.e2e.runner import GONE_WITHIN

pytestmark = pytest.mark.timeout(300)
MATRIX = [(name, phase) for name, fault in FAULTS.items() for phase in fault.phases]


@pytest.mark.parametrize(("fault", "phase"), MATRIX)
def test_fault_ends_the_job_by_name(fault, phase, tmp_path):
    outcome = run_fault(fault, phase, tmp_path / "job")
    assert outcome.problems() == [], outcome.ended.show()


def rows(seconds: dict[str, dict[str, float]]) -> list[str]:
    """Lines of the table, one for each fault: the phases, and the seconds to the end of the job."""
    out = []
    for fault, by_phase in seconds.items():
        limit = GONE_WITHIN + FAULTS[fault].waits
        measured = ", ".join(f"{phase} {value:.1f}" for phase, value in by_phase.items())
        out.append(f"| {fault} | {limit:.0f} s | {measured} |")
    return out


def main() -> None:
    """Runs the matrix."""
    record: dict[str, dict[str, float]] = {}
    wrong: dict[str, list[str]] = {}
    for fault, phase in MATRIX:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_fault(fault, phase, Path(folder) / "job")
            problems = outcome.problems()
        record.setdefault(fault, {})[phase] = round(outcome.seconds, 2)
        if problems:
            wrong[f"{fault} in {phase}"] = problems
        print(
            f"{fault} in {phase}: {outcome.seconds:.1f} s {'; '.join(wrong.get(f'{fault} in {phase}', []))}", flush=True
        )
    print("\n".join(rows(record)))
    if len(sys.argv) > 1:
        text = json.dumps({"timeout": TIMEOUT, "seconds": record, "wrong": wrong}, indent=1)
        Path(sys.argv[1]).write_text(text + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
