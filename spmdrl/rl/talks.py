"""A conversation of the policy with an environment, and what is needed to begin it or to take it up again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from spmdrl.config.environment import COLUMN, ROWS, EnvironmentConfig
from spmdrl.data.prompts import Prompt
from spmdrl.env.base import Call, Opening, Reply, Said

KEYS = ("name", "settings")
"""Keys of a row's environment that is an object."""


@dataclass
class Talk:
    """A conversation under way."""

    opening: Opening
    begun: float
    """Time at which this rank began or took up the episode."""
    messages: list[dict] = field(default_factory=list)
    """All messages up to the last observation."""
    tools: list[dict] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    """The policy's turns, in order."""
    asked: str = "open"
    """The request under way: `open`, `say`, `score`, or empty."""
    heard: tuple[list[int], bool] = ((), False)  # type: ignore[assignment]
    """Tokens of the turn that is being answered, and whether its last one ended it."""
    path: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [L]: all tokens up to the end of that turn."""
    waits: Callable[[], None] | None = None
    """Request that begins when the one under way is answered."""
    finish: str = ""
    """Reason of the end, while the final reward is asked for."""
    room: int = 0
    """Tokens that the episode may still take."""
    reward: float = 0.0
    """Of the turn that is being answered."""
    given: float = 0.0
    """All rewards so far."""
    resumed: bool = False
    """It was taken up again, and its environment is not open yet."""
    replayed: bool = False
    """It was taken up again without a state: its turns are run again."""
    failure: str = ""
    """Reason for which its environment could not be opened again."""

    def kept(self, state: object) -> dict:
        """Returns what a later step or another process needs to go on, as JSON values. state: of the environment."""
        return {
            "messages": self.messages,
            "tools": self.tools,
            "said": [asdict(said) for said in self.said],
            "given": self.given,
            "reward": self.reward,
            "finish": self.finish,
            "state": state,
        }

    def resume(self, kept: dict) -> None:
        """Takes up what `kept` returned, but for the environment's state."""
        self.resumed, self.messages, self.tools = True, list(kept["messages"]), kept["tools"]
        self.said = [Said(**each | {"calls": [Call(**call) for call in each["calls"]]}) for each in kept["said"]]
        self.given, self.reward, self.finish = kept["given"], kept["reward"], kept["finish"]
        self.replayed = kept["state"] is None

    def differs(self, reply: Reply) -> str:
        """Returns what is wrong where turns that were run again had other answers; empty where they had not.

        reply: to the request that opened the environment again.
        """
        again = list(reply.messages)
        for said, answer in zip(self.said, reply.replayed, strict=False):
            again += [said.message, *answer]
        if not self.replayed or again == self.messages:
            return ""
        return (
            f"{self.opening.name}: it gave other messages when its turns were run again after a cut; one that depends "
            "on more than row and seed needs state() and restore(state)"
        )


def opening_of(found: EnvironmentConfig, prompt: Prompt, answer_column: str, seed: int) -> Opening:
    """Returns the environment of a prompt, with its row.

    answer_column: name under which an environment finds the truth of its row, beside `ground_truth`.

    Raises:
        ValueError: rows name their environments, and this one does not, or has a key that means nothing.
    """
    row = prompt.extra | {"extra_info": prompt.extra, "data_source": prompt.data_source}
    row |= {"prompt": prompt.asked, answer_column: prompt.ground_truth, "ground_truth": prompt.ground_truth}
    name, settings = found.environment, found.settings
    if name == ROWS:
        named = prompt.extra.get(COLUMN)
        # A table gives every row the keys of all, with None in them.
        if isinstance(named, dict) and (odd := [k for k, v in named.items() if k not in KEYS and v is not None]):
            raise ValueError(
                f"row {prompt.index}: the environment in its column {COLUMN!r} has the key {odd[0]!r}, and takes only "
                f"{' and '.join(KEYS)}"
            )
        name, settings = _named(named) if isinstance(named, dict) else (named, {})
        if not isinstance(name, str) or not name or not isinstance(settings, dict):
            raise ValueError(
                f"row {prompt.index} has no environment in the column {COLUMN!r}, as --env rows wants it: a name, or "
                'an object {"name": ..., "settings": {...}}'
            )
    return Opening(name, row, seed, settings)


def _named(named: dict) -> tuple[object, object]:
    return named.get("name"), named.get("settings") or {}
