"""Scores as user code gives them: a number, or a dict of a score and its named parts."""

import math
import numbers
from typing import Any

RIGHT = 1.0 - 1e-6
"""Least score of a right answer: a sum of parts, such as 0.6 + 0.3 + 0.1, may fall short of 1 by rounding."""


def is_right(score: Any) -> Any:
    """Tell whether a score is that of a right answer, as all that counts them does: 1 or more, but for rounding.

    score: a number, or a tensor of them, whose answer is a tensor of bool. nan is not right.
    """
    return score >= RIGHT


ACCURACY = "acc"
"""Reward part that says of an answer whether it is right, where the score says more than that (verl's name for it)."""


def counts_as_right(score: float, parts: dict[str, float]) -> bool:
    """Tell whether an evaluation counts an answer as right: by its part `acc`, or by its score where it has none.

    An answer whose score is nan is not right.
    """
    return not math.isnan(score) and bool(is_right(parts.get(ACCURACY, score)))


def as_score(value: object) -> tuple[float, dict[str, float]]:
    """Return a score, which may not be finite, and its finite parts.

    value: a number, a scalar of numpy or torch, or `{"score": number, name: number, ...}`. Entries that are not finite
    numbers (verl's `pred` texts) are left out.

    Raises:
        TypeError: it is something else.
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
        raise TypeError(
            f'it returned {type(score).__name__}{shape} where a number or {{"score": number, ...}} is wanted'
        )
    parts = {str(k): as_number(v) for k, v in rest.items()}
    return number, {k: v for k, v in parts.items() if v is not None and math.isfinite(v)}


def as_number(value: object) -> float | None:
    """Return a number or a scalar of numpy or torch as a float, and None for anything else."""
    if callable(getattr(value, "item", None)):
        # A scalar, or an array or tensor of one number; `size` is a method of torch's.
        numel = getattr(value, "numel", None)
        if (numel() if callable(numel) else getattr(value, "size", 1)) == 1:
            value = value.item()  # type: ignore[attr-defined]
    return float(value) if isinstance(value, numbers.Real) else None
