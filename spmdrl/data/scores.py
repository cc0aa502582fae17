"""Reads answer scores (a number, or a dict of a score and its named parts), and scores reasoning-gym puzzles.

reasoning-gym (https://github.com/open-thought/reasoning-gym) scores each task with the task's own scorer.
"""

import json
import math
import numbers
import re
from functools import lru_cache
from typing import Any

RIGHT = 1.0 - 1e-6
"""Minimum score of a correct answer: a sum of parts, such as 0.6 + 0.3 + 0.1, can round to slightly less than 1."""


def is_right(score: Any) -> Any:
    """Return True if a score means a correct answer, that is, if it is at least 1 up to rounding. nan counts as wrong.

    score: a number, or a tensor, for which a bool tensor is returned.
    """
    return score >= RIGHT


ACCURACY = "acc"
"""Name (as in verl) of the reward part that is 1 for a correct answer. A reward whose score measures more than
correctness needs this part."""


def counts_as_right(score: float, parts: dict[str, float]) -> bool:
    """Return True if evaluations count an answer as correct, judged by its part `acc` if present, else by its score.

    An answer whose score is nan never counts as correct, whatever its `acc`.
    """
    return not math.isnan(score) and bool(is_right(parts.get(ACCURACY, score)))


def as_score(value: object) -> tuple[float, dict[str, float]]:
    """Return the score in `value`, even if it is nan or infinite, and its finite parts by name.

    value: a number, a numpy or torch scalar, or `{"score": number, name: number, ...}`. Entries that are not finite
    numbers (such as verl's `pred` strings) are omitted. Raises TypeError for any other value.
    """
    if isinstance(value, dict):
        if "score" not in value:
            raise TypeError(f'it returned a dict without "score" (keys: {", ".join(map(str, value)) or "none"})')
        score, rest = value["score"], {k: v for k, v in value.items() if k != "score"}
    else:
        score, rest = value, {}
    number = as_number(score)
    if number is None:
        shape = getattr(score, "shape", None)
        shape = "" if shape is None else f" of shape {tuple(shape)}"
        raise TypeError(f'it returned {type(score).__name__}{shape}, not a number or {{"score": number, ...}}')
    parts = {str(k): as_number(v) for k, v in rest.items()}
    return number, {k: v for k, v in parts.items() if v is not None and math.isfinite(v)}


def as_number(value: object) -> float | None:
    """Convert a number or a numpy or torch scalar to a float; return None for anything else."""
    if callable(getattr(value, "item", None)):
        # A scalar, or a one-element array or tensor. torch's `size` is a method, so try `numel` first.
        numel = getattr(value, "numel", None)
        if (numel() if callable(numel) else getattr(value, "size", 1)) == 1:
            value = value.item()  # type: ignore[attr-defined]
    return float(value) if isinstance(value, numbers.Real) else None


def describe(key: object) -> str:
    """Describe the key of a graded item: an int is a prompt index, a tuple starts with (prompt, sample)."""
    if isinstance(key, tuple) and len(key) >= 2:
        return f"prompt {key[0]}, sample {key[1]}"
    return f"prompt {key}" if isinstance(key, int) else f"item {key}"


# ── puzzles of reasoning-gym ─────────────────────────────────────────────────

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks of reasoning-gym 0.1.25 that compare grids as tuples, which JSON turned into lists."""


def answer_of(reply: str) -> tuple[str, bool]:
    """Return the text in a reply's last `<answer>` tags, or else the whole reply, and whether it has such tags."""
    tagged = _ANSWER.findall(reply)
    return (tagged[-1] if tagged else reply).strip(), bool(tagged)


def puzzle_score(task: str, config: dict, entry: dict, answer: str) -> float:
    """Score an answer to a task, from 0 to 1. config, entry: columns of `reasoning-gym:<task>`."""
    entry = _tuples(entry) if task in _TUPLE_TASKS else entry
    return data_set_score(_data_set(task, json.dumps(config)), entry, answer)


def data_set_score(data: Any, entry: dict, answer: str) -> float:
    """Score an answer to an entry of a reasoning-gym data set.

    Some scorers raise an error for text that they cannot parse; such an answer scores 0. If a scorer also fails on the
    puzzle's reference answer, its error is re-raised.
    """
    try:
        return float(data.score_answer(answer, entry))
    except Exception:
        data.score_answer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=32)
def _data_set(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
