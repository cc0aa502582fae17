"""The long form of tests/ranks/test_fuzz.py: 240 configurations of composed settings.

python -m tests.long.test_fuzz [--first N] [--count N] [--json FILE]    prints what is wrong with each, and the record

docs/reliability.md quotes the record; `python -m tests.ranks.fuzz N` runs one of them again.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.ranks.fuzz import Bench, Case, run_case

COUNT = 240


def record(cases: Iterable[Case]) -> dict:
    """Counts of the results of the configurations, and the configurations with problems."""
    cases = list(cases)
    taken = Counter(answer for case in cases for answer in case.without.values())
    return {
        "configurations": len(cases),
        "with_a_setting_refused": sum(bool(case.refused) for case in cases),
        "refusals": sum(len(case.refused) for case in cases),
        "layouts": dict(Counter(case.layout for case in cases)),
        "settings_that_ran": len({name for case in cases for name in case.flags}),
        "taken_away": {name: taken[name] for name in ("differs", "same", "refused")},
        "defects": {str(case.number): case.problems for case in cases if case.problems},
        "minutes": round(sum(case.seconds for case in cases) / 60, 1),
    }


def run_all(root: Path, numbers: Iterable[int], kept: Path | None = None) -> list[Case]:
    """Runs every configuration, and prints each that has problems as it ends."""
    bench, cases = Bench(root), []
    for number in numbers:
        cases.append(run_case(bench, number))
        line = json.dumps(asdict(cases[-1]))
        if kept:
            with open(kept, "a") as file:
                file.write(line + "\n")
        if cases[-1].problems:
            print(line, flush=True)
    return cases


@pytest.mark.timeout(7200)
def test_fuzz_hundreds_of_configurations(tmp_path):
    found = record(run_all(tmp_path, range(COUNT)))
    print(json.dumps(found, indent=1))
    assert found["configurations"] == COUNT and found["settings_that_ran"] > 70
    assert not found["defects"], json.dumps(found["defects"], indent=1)


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--first", type=int, default=0)
    words.add_argument("--count", type=int, default=COUNT)
    words.add_argument("--json", type=Path, help="a line for each configuration, added to the file")
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(record(run_all(Path(folder), range(asked.first, asked.first + asked.count), asked.json))))
