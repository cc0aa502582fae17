"""Maps the parameters of losses and advantages, built-in or in a user's file, to settings by name."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from spmdrl.config.fields import leaves
from spmdrl.config.schema import Config

if TYPE_CHECKING:
    from spmdrl.algos.estimators import Advantage
    from spmdrl.algos.losses import Loss

Kind = Literal["loss", "advantage"]
KINDS: tuple[Kind, ...] = ("loss", "advantage")
NAMED = {
    "kl_coef": "algo.cov_kl_coef",
    "weights": "algo.part_weights",
    "process_coef": "process_reward.process_coef",
    "outcome_coef": "process_reward.outcome_coef",
}
"""Parameter -> setting that provides its value; other parameters use the setting of the same name in `algo`."""


def parameters_of(function: Callable) -> dict[str, str]:
    """Return parameter -> setting for each parameter of a loss or an advantage that has a setting."""
    known = leaves(Config)
    names = {name: NAMED.get(name, f"algo.{name}") for name in inspect.signature(function).parameters}
    return {name: setting for name, setting in names.items() if setting in known}


def read_by(row: "Loss | Advantage") -> frozenset[str]:
    """Return the settings that a loss or advantage reads, by dotted name. row: its entry in LOSSES or ADVANTAGES."""
    aggregated = () if getattr(row, "scope", "one per sequence") == "one per sequence" else ("algo.aggregation",)
    return frozenset({*parameters_of(row.function).values(), *aggregated})


@functools.cache
def read_by_any(kind: Kind) -> frozenset[str]:
    """Return the settings that at least one built-in loss or advantage (`kind`) reads."""
    # Lazy imports: algos/ needs torch, but `--help` must work without it.
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.losses import LOSSES

    rows = LOSSES if kind == "loss" else ADVANTAGES
    return frozenset(setting for row in rows.values() for setting in read_by(row))


def only_of(kind: Kind) -> frozenset[str]:
    """Return the settings in `algo` that losses or advantages (`kind`) read.

    If a user replaces a preset's function, the preset's values for these settings are discarded.
    """
    return frozenset(setting for setting in read_by_any(kind) if setting.startswith("algo."))
