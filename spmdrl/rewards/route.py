"""The reward `auto`, which grades each row with the built-in reward for its `data_source`, as verl does.

The table follows verl's `default_compute_score` (verl/utils/reward_score/__init__.py of
https://github.com/volcengine/verl), but uses the reward `math` instead of `prime_math` and has no reward for
Geometry3K.
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
"""Built-in reward by data_source."""
PREFIXES = {"aime": "math_dapo", "numina_": "math", "searchR1_": "exact_match_qa"}
"""Built-in reward by data_source prefix."""


def reward_of(data_source: str) -> str:
    """Return the name of the reward for a data source. Raises ValueError if there is none."""
    if data_source in ROUTE:
        return ROUTE[data_source]
    for prefix, reward in PREFIXES.items():
        if data_source.startswith(prefix):
            return reward
    known = ", ".join([*ROUTE, *(f"{prefix}*" for prefix in PREFIXES)])
    raise ValueError(
        f"auto has no reward for data_source {data_source[:100]!r}; it has rewards for {known}: "
        "name a reward with --reward.function, or change the rows' data_source"
    )


class Route:
    """The score and parts of the built-in reward for the row's `data_source`
    (docs/rewards.md#auto-one-run-several-data-sets).

    A reward is loaded at startup if it grades one of the sources in the setting `sources`, otherwise on first use.
    """

    def __init__(self, settings: dict[str, Any]):
        """Load the rewards for the sources in the setting `sources`; other settings are passed to the rewards.

        Raises ValueError if a source has no reward, or if a reward cannot be loaded.
        """
        self._settings = {name: value for name, value in settings.items() if name != "sources"}
        self._loaded: dict[str, Callable[[RewardInput], object]] = {}
        for source in settings.get("sources", ()):
            if reward_of(source) not in self._loaded:
                self.load(RewardInput(source, "", ""))

    @property
    def note(self) -> str:
        """Return the notes of the loaded rewards, for the log."""
        return "; ".join(filter(None, (getattr(each, "note", "") for each in self._loaded.values())))

    def needs(self, item: RewardInput) -> bool:
        """Return whether the row's reward must be loaded first; load time does not count as grading time."""
        name = self._name(item)
        return bool(name) and name not in self._loaded

    def load(self, item: RewardInput) -> None:
        """Load the row's reward. Raises ValueError if it cannot be loaded."""
        name = reward_of(item.data_source)
        if name not in REWARDS:
            raise ValueError(f"data_source {item.data_source!r} needs the reward {name}, which is not built in")
        self._loaded[name] = load_builtin(name, self._settings)

    def may_take(self, item: RewardInput) -> float:
        """Return the maximum grading time in seconds if the row's reward has time limits of its own, else 0."""
        own = getattr(self._loaded.get(self._name(item)), "may_take", None)
        return own(item) if own else 0.0

    def _name(self, item: RewardInput) -> str:
        try:
            return reward_of(item.data_source)
        except ValueError:
            return ""

    def __call__(self, item: RewardInput) -> object:
        """Grade one response with the reward for its row."""
        if self.needs(item):
            self.load(item)
        return self._loaded[reward_of(item.data_source)](item)


def load(name: str, settings: dict[str, Any]) -> Route:
    """Return the reward `auto`."""
    return Route(settings)
