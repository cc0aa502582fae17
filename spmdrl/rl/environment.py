"""Environments that the policy acts in: each answers a response with an observation, or ends the episode."""

from dataclasses import dataclass
from typing import Protocol

from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt


@dataclass
class Observation:
    """An environment's answer to a response."""

    tokens: list[int]
    """Appended to the episode as they are, one at least; the policy goes on after them."""
    state: int | None = None
    """Number of the state that they show, below `data.episode.STATES`; 0 is the state that the prompt shows. None: the
    whole episode so far is the state."""


class Environment(Protocol):
    """The other side of an episode."""

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """The answer to the episode's last response, or None where the episode is over.

        It is asked once a response has ended by itself (`stop`), on every rank of an engine, and must answer alike on
        all of them and however often the episode is run.
        """
        ...


class SingleTurn:
    """Ends an episode with its first response."""

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """See the contract."""
        return None
