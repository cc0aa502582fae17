"""The long form of tests/unit/test_turns.py: 504 random dialogues, seven under each of the 72 chat templates of trl.

python -m tests.long.test_turns    prints the record, which docs/sft.md quotes
"""

import json
from collections import Counter
from itertools import pairwise

import pytest

from tests.unit.dialogues import dialogue
from tests.unit.test_turns import TEMPLATES, check, excused

FIRST, EACH = 100, 7
"""Seed of a template's first dialogue, and dialogues for each template; the short form has other seeds."""
CHAINED = "deepseekv3"
"""Its template opens the first round of calls only, and leaves out where the answers of a round before another end."""


def faulty(name: str, seed: int, refusal: str) -> bool:
    """Tells whether a refusal is of a template that is known to be at fault."""
    messages = dialogue(seed, bool(seed % 2), seed % 4 > 1)
    chained = any(one["role"] == "tool" and two.get("tool_calls") for one, two in pairwise(messages))
    return name.removesuffix("_training") == CHAINED and chained and "differently once the turn is there" in refusal


def record(names: list[str]) -> dict:
    """Counts of what became of the dialogues, and those refused for a reason that is none of the template's."""
    found, defects = Counter(), {}
    for name in names:
        for seed in range(FIRST, FIRST + EACH):
            try:
                said = check(name, seed)
            except AssertionError as error:
                said = f"failed: {error}"
            if said.startswith("accepted"):
                found.update(said.split())
            elif excused(name, said) or faulty(name, seed, said):
                found["refused by the template, or because it leaves a part out"] += 1
            else:
                defects[f"{name} {seed}"] = said
    return {"templates": len(names), "dialogues": EACH * len(names), **found, "defects": defects}


@pytest.mark.timeout(3600)
def test_turns_of_hundreds_of_dialogues_are_proved():
    found = record(list(TEMPLATES))
    print(json.dumps(found, indent=1))
    assert found["dialogues"] >= 500 and found["accepted"] >= 340
    assert not found["defects"], json.dumps(found["defects"], indent=1)


if __name__ == "__main__":
    print(json.dumps(record(list(TEMPLATES)), indent=1))
