"""reasoning-gym tasks (https://github.com/open-thought/reasoning-gym) graded by each task's own scorer."""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from spmdrl.rewards.base import Reward, RewardInput

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks that compare grids as tuples (0.1.25): JSON made lists of them."""


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


@lru_cache(maxsize=32)
def _task(name: str, config: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def reasoning_reward(item: RewardInput) -> Reward:
    """The task's score of the reply (in `<answer>` tags, or all of it). Part `format`: the tags are there.

    `extra` holds the columns of prompts from `reasoning-gym:<task>`: task, config, entry.
    """
    if not {"task", "config", "entry"} <= item.extra.keys():
        raise ValueError("the reward reasoning_gym grades prompts of --data.train reasoning-gym:<task> only")
    name, entry = item.extra["task"], item.extra["entry"]
    tagged = _ANSWER.findall(item.solution)
    answer = (tagged[-1] if tagged else item.solution).strip()
    task = _task(name, json.dumps(item.extra["config"]))
    score = task.score_answer(answer, _tuples(entry) if name in _TUPLE_TASKS else entry)
    return Reward(float(score), {"format": float(bool(tagged))})


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Give the reward after the import of reasoning-gym. Raises ValueError when it is not installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as e:
        raise ValueError("the reward reasoning_gym needs the package: pip install 'spmdrl[reasoning-gym]'") from e
    return reasoning_reward
