"""Rules shared by all jobs: rules declared by individual settings, and rules for rows and checkpoints."""

import math
from typing import Any

from spmdrl.config.declare import declared
from spmdrl.config.fields import flag, get, shown
from spmdrl.config.schema import CheckpointConfig
from spmdrl.config.template import template_kwargs


def rule_problems(config: Any) -> list[str]:
    """Return a line for each value that violates its setting's declared rule."""
    return [
        f"{flag(name)} {shown(get(config, name))}: {each.rule.says}"
        for name, each in declared(type(config)).items()
        if each.rule and not each.rule.valid(get(config, name))
    ]


def never_measured(checkpoint: CheckpointConfig, every: int, steps: int) -> list[str]:
    """Return a line if no checkpoint before the last step would be evaluated for the metric in `--checkpoint.best`.

    There is no line if checkpoints or evaluations are off during the run. every: the value of `--eval.every`. steps:
    number of steps in the run, or 0 if it is not known yet.
    """
    both = math.lcm(checkpoint.every, every)
    if "eval/" not in checkpoint.best or not steps or not both or both < steps or checkpoint.every >= steps:
        return []
    return [
        f"--checkpoint.best {checkpoint.best}: --checkpoint.every {checkpoint.every} and --eval.every {every} never "
        f"save and measure the same weights before the last of {steps} steps; take a multiple of --eval.every for "
        "--checkpoint.every"
    ]


def rows_and_checkpoint_problems(config: Any, unmeasured: str) -> list[str]:
    """Return lines about the chat template for the rows, and about the metric that selects the best checkpoint.

    unmeasured: reason why no evaluation measures metrics, such as `without --data.eval`, or "" if one does.
    """
    data, best, problems, unread = config.data, config.checkpoint.best, [], []
    try:
        unread = ["--data.template-kwargs"] if template_kwargs(data) else []
    except ValueError as error:
        problems.append(str(error))
    if data.chat == "off":
        unread = (["--data.chat-template"] if data.chat_template else []) + unread
        problems = [
            f"--data.chat off: no chat template is used, so nothing reads {name}; leave one of the two out"
            for name in unread
        ] + problems
    if "eval/" in best and unmeasured:
        problems.append(f"--checkpoint.best {best}: is not measured {unmeasured}")
    return problems + never_measured(config.checkpoint, config.eval.every, config.run.steps)
