"""Rules of single settings, as their fields declare them, and one that three kinds of jobs have in common."""

import math
from typing import Any

from spmdrl.config.declare import declared
from spmdrl.config.fields import flag, get, shown
from spmdrl.config.schema import CheckpointConfig


def rule_problems(config: Any) -> list[str]:
    """One line for each setting that its rule does not allow."""
    return [
        f"{flag(name)} {shown(get(config, name))}: {each.rule.says}"
        for name, each in declared(type(config)).items()
        if each.rule and not each.rule.valid(get(config, name))
    ]


def never_measured(checkpoint: CheckpointConfig, every: int, steps: int) -> list[str]:
    """Return a line where no evaluation before the end of a run measures weights that `--checkpoint.best` may keep.

    every: as `--eval.every`. steps: of the run; 0: not known yet.
    """
    both = math.lcm(checkpoint.every, every)
    if "eval/" not in checkpoint.best or not steps or not both or both < steps or checkpoint.every >= steps:
        return []
    return [
        f"--checkpoint.best {checkpoint.best}: --checkpoint.every {checkpoint.every} and --eval.every {every} never "
        f"save and measure the same weights before the last of {steps} steps; take a multiple of --eval.every for "
        "--checkpoint.every"
    ]
