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
    return graded(_made(task, json.dumps(config)), _tuples(entry) if task in _TUPLE_TASKS else entry, answer)


def graded(made: Any, entry: dict, answer: str) -> float:
    """Return the score of an answer to a puzzle of a data set of reasoning-gym's.

    Scorers of some tasks raise on text that they cannot read, which is worth 0; one that raises on the puzzle's own
    answer as well raises here.
    """
    try:
        return float(made.score_answer(answer, entry))
    except Exception:
        made.score_answer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=32)
def _made(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
