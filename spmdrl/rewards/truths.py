"""Finds rows whose truths a reward cannot compare with, before a run begins."""

from collections.abc import Callable, Mapping

from spmdrl.config.rewards import functions
from spmdrl.config.schema import RewardConfig
from spmdrl.data.prompts import PromptSet
from spmdrl.rewards.base import RewardInput
from spmdrl.rewards.quick import QUICK
from spmdrl.rewards.text import truth_text

RESPONSE = "0"
"""Any response will do: a built-in reward looks at the truth first."""
CHECKS: Mapping[str, Callable[[RewardInput], object]] = {**QUICK, "math": lambda item: truth_text(item.ground_truth)}
"""Rewards that are quick to ask; the environment's is known in an episode alone."""


def check_truths(prompts: PromptSet, reward: RewardConfig) -> None:
    """Ask each built-in reward for a score of some response to every row.

    Raises:
        ValueError: naming the first row that a reward cannot score, why, and how many there are.
    """
    for name in functions(reward):
        if name == "environment" or not (score := CHECKS.get(name)):
            continue
        found: list[tuple[int, str]] = []
        for prompt in prompts.prompts:
            try:
                score(RewardInput(prompt.data_source, RESPONSE, prompt.ground_truth, prompt.extra, prompt.content))
            except ValueError as error:
                found.append((prompt.index, str(error)))
        if found:
            index, why = found[0]
            more = f" ({len(found)} rows of {len(prompts)} are so)" if len(found) > 1 else ""
            raise ValueError(f"{prompts.place(index)}: {name} cannot grade this row: {why}{more}")
