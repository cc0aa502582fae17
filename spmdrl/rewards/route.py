"""The reward `auto`: each row is graded by the built-in reward that its `data_source` names, as verl does.

The table follows verl's `default_compute_score` (verl/utils/reward_score/__init__.py of
https://github.com/volcengine/verl), whose `prime_math` is here the symbolic `math`. Geometry3K has no grader here.
"""

from collections.abc import Callable
from typing import Any

from spmdrl.config.builtin import REWARDS
from spmdrl.rewards.base import RewardInput
from spmdrl.rewards.forms import load_builtin

ROUTE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "boxed",
    "DigitalLearningGmbH/MATH-lighteval": "boxed",
    "HuggingFaceH4/MATH-500": "boxed",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "apps": "code_partial",
    "codecontests": "code_partial",
    "codeforces": "code_partial",
    "taco": "code_partial",
}
"""data_source -> built-in reward."""
PREFIXES = {"aime": "math_dapo", "numina_": "math", "searchR1_": "exact_match_qa"}
"""Beginnings of a data_source -> built-in reward."""


def reward_of(data_source: str) -> str:
    """Return the name of the reward that grades rows of a source. Raises ValueError for a source without one."""
    if data_source in ROUTE:
        return ROUTE[data_source]
    for prefix, reward in PREFIXES.items():
        if data_source.startswith(prefix):
            return reward
    known = ", ".join([*ROUTE, *(f"{prefix}*" for prefix in PREFIXES)])
    raise ValueError(
        f"auto knows no reward for data_source {data_source[:100]!r}; it knows {known}: "
        "name one with --reward.function, or change the rows' data_source"
    )


class Route:
    """The score and parts of the reward that the row's `data_source` names
    (docs/rewards.md#auto-one-run-several-data-sets).

    Each reward is loaded when its first row comes.
    """

    def __init__(self, settings: dict[str, Any]):
        """Load the rewards of the sources that will come: the setting `sources`. Others are settings of the rewards.

        Raises ValueError for a source without a reward, and for a reward that does not load.
        """
        self._settings = {name: value for name, value in settings.items() if name != "sources"}
        self._loaded: dict[str, Callable[[RewardInput], object]] = {}
        for source in settings.get("sources", ()):
            if reward_of(source) not in self._loaded:
                self.load(RewardInput(source, "", ""))

    @property
    def note(self) -> str:
        """Notes of its rewards for the log."""
        return "; ".join(filter(None, (getattr(each, "note", "") for each in self._loaded.values())))

    def needs(self, item: RewardInput) -> bool:
        """Tell whether the row's reward is still to load, which takes time that is not the grading's."""
        name = self._name(item)
        return bool(name) and name not in self._loaded

    def load(self, item: RewardInput) -> None:
        """Load the row's reward. Raises ValueError when it cannot be loaded."""
        name = reward_of(item.data_source)
        if name not in REWARDS:
            raise ValueError(f"there is no reward {name} here, which grades data_source {item.data_source!r}")
        self._loaded[name] = load_builtin(name, self._settings)

    def may_take(self, item: RewardInput) -> float:
        """Return seconds that a grading may take where its reward has clocks of its own, else 0."""
        own = getattr(self._loaded.get(self._name(item)), "may_take", None)
        return own(item) if own else 0.0

    def _name(self, item: RewardInput) -> str:
        try:
            return reward_of(item.data_source)
        except ValueError:
            return ""

    def __call__(self, item: RewardInput) -> object:
        """Grade one response by its row's reward."""
        if self.needs(item):
            self.load(item)
        return self._loaded[reward_of(item.data_source)](item)


def load(name: str, settings: dict[str, Any]) -> Route:
    """Return the reward `auto`, which loads the rewards of rows as they come."""
    return Route(settings)
