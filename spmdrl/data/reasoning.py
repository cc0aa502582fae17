"""Puzzles of reasoning-gym (https://github.com/open-thought/reasoning-gym): their scores by each task's own scorer."""

import json
import re
from functools import lru_cache
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks that compare grids as tuples (0.1.25): JSON made lists of them."""


def answer_of(reply: str) -> tuple[str, bool]:
    """Return the answer of a reply, in its last `<answer>` tags or all of it, and whether the tags are there."""
    tagged = _ANSWER.findall(reply)
    return (tagged[-1] if tagged else reply).strip(), bool(tagged)


def score(task: str, config: dict, entry: dict, answer: str) -> float:
    """Return a task's score of an answer, 0 to 1. config, entry: as `reasoning-gym:<task>` puts them in a row."""
    made = made_task(task, json.dumps(config))
    return float(made.score_answer(answer, _tuples(entry) if task in _TUPLE_TASKS else entry))


@lru_cache(maxsize=32)
def made_task(name: str, config: str) -> Any:
    """Return the data set of a task. config: its settings as JSON."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
