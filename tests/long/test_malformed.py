"""500 malformed settings, data files and model folders: none may end without a message, and each must end.

python -m tests.long.test_malformed [--seed N]     prints one JSON record for docs/reliability.md
"""

import argparse
import json
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.unit import malformed

EXAMPLES = {"settings": 220, "data": 200, "model": 80}


def run_all(kind: str, start: int) -> dict:
    """Runs all examples of a kind; returns outcomes and seconds."""
    began, longest = time.monotonic(), [0.0]

    @seed(start)
    @settings(
        max_examples=EXAMPLES[kind],
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        at = time.monotonic()
        malformed.one_case(data.draw, kind)
        longest[0] = max(longest[0], time.monotonic() - at)

    malformed.outcomes.clear()
    run()
    counts = {outcome: malformed.outcomes[kind, outcome] for outcome in ("read", "refused")}
    return counts | {"seconds": round(time.monotonic() - began, 1), "longest_s": round(longest[0], 2)}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_malformed_500(kind):
    found = run_all(kind, 0)
    assert found["read"] + found["refused"] >= EXAMPLES[kind], found
    assert found["refused"] > EXAMPLES[kind] // 10, found


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--seed", type=int, default=0)
    start = words.parse_args().seed
    print(json.dumps({"malformed": {kind: run_all(kind, start) for kind in EXAMPLES}, "seed": start}))
