"""Settings of a method that become parameters: a function of algos/ or of a user takes them by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Literal

from spmdrl.config.fields import leaves
from spmdrl.config.schema import Config

Kind = Literal["loss", "advantage"]
NAMED = {
    "kl_coef": "algo.cov_kl_coef",
    "weights": "algo.part_weights",
    "process_coef": "process_reward.process_coef",
    "outcome_coef": "process_reward.outcome_coef",
}
"""Parameter -> the setting that fills it, where that is not `algo.` and its name."""


def parameters_of(function: Callable) -> dict[str, str]:
    """Parameter -> the setting that fills it, of every parameter of a loss or an advantage that is a setting."""
    known = leaves(Config)
    names = {name: NAMED.get(name, f"algo.{name}") for name in inspect.signature(function).parameters}
    return {name: setting for name, setting in names.items() if setting in known}


def read_by(kind: Kind, name: str) -> frozenset[str]:
    """Settings that a loss or an advantage of this name reads.

    Raises:
        KeyError: no such name; a user's own function is in a file that is not run here.
    """
    # Late, as algos/ needs torch and `--help` must not.
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.losses import LOSSES

    if kind == "advantage":
        return frozenset(parameters_of(ADVANTAGES[name].function).values())
    aggregated = () if LOSSES[name].scope == "one per sequence" else ("algo.aggregation",)
    return frozenset({*parameters_of(LOSSES[name].function).values(), *aggregated})


@functools.cache
def only_of(kind: Kind) -> frozenset[str]:
    """Settings under `algo` that only functions of a kind read: they go when a preset's function is replaced."""
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.losses import LOSSES

    read = (setting for name in (LOSSES if kind == "loss" else ADVANTAGES) for setting in read_by(kind, name))
    return frozenset(setting for setting in read if setting.startswith("algo."))
