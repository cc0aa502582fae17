"""reasoning-gym tasks (https://github.com/open-thought/reasoning-gym) graded by each task's own scorer."""

from collections.abc import Callable
from typing import Any

from spmdrl.data.reasoning import answer_of, score
from spmdrl.rewards.base import Reward, RewardInput


def reasoning_reward(item: RewardInput) -> Reward:
    """The task's own score of the text in `<answer>` tags, else of the response; 0 for an answer that its scorer
    cannot read. Part `format`: there are tags.

    `extra` holds the columns of prompts from `reasoning-gym:<task>`: task, config, entry.
    """
    if not {"task", "config", "entry"} <= item.extra.keys():
        raise ValueError("the reward reasoning_gym grades prompts of --data.train reasoning-gym:<task> only")
    answer, tagged = answer_of(item.solution)
    value = score(item.extra["task"], item.extra["config"], item.extra["entry"], answer)
    return Reward(value, {"format": float(tagged)})


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Give the reward after the import of reasoning-gym. Raises ValueError when it is not installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as e:
        raise ValueError("the reward reasoning_gym needs the package: pip install 'spmdrl[reasoning-gym]'") from e
    return reasoning_reward
