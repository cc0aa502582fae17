"""The long form of tests/sandbox/test_attacks.py: 5,000 runs of the table of attacks, several at a time.

    python -m tests.long.test_hostile [--provider NAME] [--runs N]      prints one JSON record for the docs

Nothing may get out, and no process, file or open file may be left behind: they are compared exactly. The caller's own
memory may grow by a few MiB.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest

from spmdrl_sandbox.open import AUTO
from tests.sandbox.attacks import ATTACKS, UNPROMISED
from tests.sandbox.hostile import Traces, adopt, caller_in, kept_in
from tests.sandbox.opened import settled

RUNS = 5000
WARM_UP = 16
"""Runs before the first look: modules that the first ones import, and the allocator's."""
GROWTH_MIB = 24


def quiet(folder: Path) -> Traces:
    """Looks once two looks are the same: processes that end do so a moment after their sandbox."""
    looks = [Traces.of(folder)]

    def same() -> bool:
        looks.append(Traces.of(folder))
        return looks[-1] == looks[-2]

    settled(same)
    return looks[-1]


def record(provider: str, runs: int, folder: Path) -> dict:
    """Runs the table round and round; folder: for files of the caller and of its sandboxes."""
    adopt()
    temporary = folder / "tmp"
    temporary.mkdir()
    place = tempfile.tempdir
    tempfile.tempdir = str(temporary)
    (folder / "caller").mkdir()
    promised = [attack for attack in ATTACKS if attack.name not in UNPROMISED[provider]]
    process, own = psutil.Process(), Traces.of().processes
    try:
        with caller_in(folder / "caller") as caller:
            wrong = kept_in(promised[:WARM_UP], provider, caller)
            # Of the first sandboxes a process may still be ending, and would be missed later.
            before = replace(quiet(folder / "caller"), processes=own)
            held, began = process.memory_info().rss, time.monotonic()
            wrong += kept_in(islice(cycle(promised), runs), provider, caller)
            seconds, grown = time.monotonic() - began, process.memory_info().rss - held
            settled(lambda: not before.differences(Traces.of(folder / "caller")))
            left = before.differences(quiet(folder / "caller")) + [f"{each} is left" for each in temporary.rglob("*")]
    finally:
        tempfile.tempdir = place
    numbers = {"seconds": round(seconds), "grown_mib": round(grown / (1 << 20), 1)}
    return {"provider": provider, "runs": runs, "attacks": len(promised)} | numbers | {"wrong": wrong, "left": left}


@pytest.mark.parametrize("provider", AUTO)
@pytest.mark.timeout(7200)
def test_thousands_of_hostile_runs_are_kept_in_and_leave_nothing(provider, tmp_path):
    found = record(provider, RUNS, tmp_path)
    print(json.dumps(found, indent=1))
    assert found["wrong"] == [] and found["left"] == [] and found["grown_mib"] < GROWTH_MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=AUTO, default=AUTO[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(record(args.provider, args.runs, Path(folder))))


if __name__ == "__main__":
    main()
