"""All advantage estimators by name, with the inputs and settings that each takes."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from spmdrl.algos import advantages, credit, turns
from spmdrl.algos.samples import Result

ADVANTAGES: dict[str, Callable[..., Result]] = {
    "gae": credit.gae,
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "remax": credit.remax,
    "reinforce_plus_plus": credit.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "grpo_pass_k": advantages.grpo_pass_k,
    "gdpo": advantages.gdpo,
    "optimal_token_baseline": credit.optimal_token_baseline,
    "gigpo": turns.gigpo,
    "win_rate": advantages.win_rate,
    "per_token": credit.per_token,
    "prime": credit.prime,
    "grpo_process": credit.grpo_process,
    "turn_rloo": turns.turn_rloo,
    "turn_gae": turns.turn_gae,
}

NEEDS: dict[str, tuple[str, ...]] = {
    "gae": ("values",),
    "remax": ("baseline",),
    "optimal_token_baseline": ("logp", "collision"),
    "prime": ("process",),
    "grpo_process": ("process", "ends"),
    "turn_gae": ("values",),
}
"""Fields of Samples without which an estimator raises; one that is not here needs none."""
READS: dict[str, tuple[str, ...]] = {
    "gigpo": ("turn", "state", "parent"),
    "turn_rloo": ("turn", "parent"),
    "turn_gae": ("turn", "parent"),
}
"""Fields that an estimator reads where there are any."""

GROUPLESS = frozenset({"gae", "remax", "reinforce", "reinforce_plus_plus", "per_token", "turn_gae"})
"""Estimators that do not look at `group`."""

F = TypeVar("F")


def find(name: str, table: Mapping[str, F], what: str) -> F:
    """table[name]. ValueError: no such name; the message has the nearest one and the list."""
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}: choose one of {', '.join(table)}")


def settings_of(function: Callable) -> dict[str, object]:
    """Keyword-only parameters of a function of algos/, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def nearest(name: str, known) -> str:
    """`, did you mean ...?` for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
