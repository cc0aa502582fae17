"""The long form of tests/unit/test_conversation.py: random dialogues under each of the 72 chat templates of trl.

python -m tests.long.test_conversation 500    prints the record of 500 dialogues for each template and kind of history
"""

import json
import sys
import traceback
from collections import Counter

import pytest

from tests.unit.test_conversation import TEMPLATES, check, conversation

FIRST, EACH = 1000, 40
"""Seed of a template's first dialogue, and dialogues for each template in the test; the short form has other seeds."""


def record(names: list[str], each: int) -> dict:
    """Counts of what became of the conversations, and those that fail."""
    found, defects = {"keep": Counter(), "branch": Counter()}, {}
    for name in names:
        for history, counts in found.items():
            for seed in range(FIRST, FIRST + each):
                counts["dialogues"] += 1
                try:
                    counts.update(check(name, seed, history))
                except Exception as error:
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    defects[f"{name} {seed} {history}"] = f"{type(error).__name__} {error} ({place.line})"
    rewriting = [name for name in names if conversation(name, "keep").rewrites]
    return {"templates": len(names), "templates that rewrite": len(rewriting), **found, "defects": defects}


@pytest.mark.timeout(7200)
def test_thousands_of_conversations_keep_every_token():
    found = record(list(TEMPLATES), EACH)
    print(json.dumps(found, indent=1))
    for history in ("keep", "branch"):
        assert found[history]["conversations"] >= 0.85 * found[history]["dialogues"] == 0.85 * EACH * len(TEMPLATES)
    assert not found["keep"]["forks"] and found["branch"]["forks"] >= EACH
    assert not found["defects"], json.dumps(found["defects"], indent=1)


if __name__ == "__main__":
    print(json.dumps(record(list(TEMPLATES), int(sys.argv[1]) if len(sys.argv) > 1 else EACH), indent=1))
