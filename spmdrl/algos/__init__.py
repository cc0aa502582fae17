"""The science: pure functions on tensors. No process groups, no configuration, nothing from the rooms above.

Advantages and losses are reached through their dicts, as `reinforce` names one of each.
"""

from spmdrl.algos.advantages import ADVANTAGES
from spmdrl.algos.aggregate import AGGREGATIONS, Totals, count_totals, token_weights
from spmdrl.algos.kl import KL_KINDS, kl_estimate
from spmdrl.algos.losses import LOSSES, LossInputs, LossResult
from spmdrl.algos.presets import PRESETS, Preset

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_KINDS",
    "LOSSES",
    "PRESETS",
    "LossInputs",
    "LossResult",
    "Preset",
    "Totals",
    "count_totals",
    "kl_estimate",
    "token_weights",
]
