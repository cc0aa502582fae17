"""The long form of tests/e2e/test_kills.py: 100 kills. `python -m tests.long.test_kills` prints its record as JSON."""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.kills import PHASES, story

KILLS, STEPS, SEED = 100, 25, 11


def measured(root: Path, kills: int = KILLS) -> dict:
    """Record that docs/reliability.md quotes: counts, not every kill."""
    began = time.time()
    told = story(root, kills, STEPS, SEED)
    return {
        "seed": SEED,
        "steps": STEPS,
        "kills": len(told["kills"]),
        "by_phase": dict(Counter(kill["phase"] for kill in told["kills"])),
        "inside_the_phase": sum(kill["how"] == "inside" for kill in told["kills"]),
        "by_rank": dict(Counter(str(kill["rank"]) for kill in told["kills"])),
        "runs": len(told["runs"]),
        "runs_bit_equal": sum(found == [] for found in told["runs"]),
        "odd": told["odd"],
        "minutes": round((time.time() - began) / 60, 1),
    }


@pytest.mark.timeout(7200)
def test_a_hundred_kills_change_nothing(tmp_path):
    record = measured(tmp_path)
    print(json.dumps(record, indent=1))
    assert record["odd"] == [] and record["kills"] == KILLS and record["by_phase"] == dict.fromkeys(PHASES, KILLS // 4)
    assert record["runs_bit_equal"] == record["runs"] > 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else KILLS), indent=1))
