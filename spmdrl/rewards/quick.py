"""Built-in rewards that are quick and certain to end, whatever a response holds."""

from collections.abc import Callable
from importlib import import_module

from spmdrl.config.builtin import REWARDS
from spmdrl.rewards.base import Reward, RewardInput

QUICK: dict[str, Callable[[RewardInput], Reward]] = {
    name: getattr(import_module(f"spmdrl.rewards.{row.module}"), name)
    for name, row in REWARDS.items()
    if not row.pooled
}
"""Called in the process itself."""
