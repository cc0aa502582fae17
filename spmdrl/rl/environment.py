"""The other side of an episode: it begins the episode, answers each response with an observation, and ends it."""

import json
from dataclasses import dataclass, field

from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.spmd.exchange import broadcast_text
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics

COUNTS = (
    *("episodes", "turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures"),
    *("whole_turns", "whole_calls", "seconds", "idle"),
)
"""Sums over a rollout. episodes: those that ended without a failure; whole_turns and whole_calls: theirs. seconds: the
time of all answers; idle: the time in which an engine only waited for them."""
Place = tuple[int, int]
"""(position, sample): the name of an episode inside a rollout."""


@dataclass
class Observation:
    """An environment's answer to a response, the beginning of an episode, or its end."""

    tokens: list[int] = field(default_factory=list)
    """Tokens to append to the episode; the policy goes on after them. At the beginning: the prompt."""
    state: int | None = None
    """Number of the state that they show, below `data.episode.STATES`; 0 is the state that the prompt shows. None: the
    whole episode so far is the state."""
    anew: bool = False
    """True if the tokens are a whole prompt, from which the episode goes on in a branch (`Episode.fork`)."""
    over: str = ""
    """Reason for which the episode ends here (`FINISH_REASONS`); empty if it goes on."""
    reward: float = 0.0
    """Reward for the turn that is answered."""
    given: float | None = None
    """At the end: the sum of the environment's rewards, unweighted. None: no environment gives rewards."""
    parts: dict[str, float] = field(default_factory=dict)
    """At the end: parts of the final reward."""
    failure: str = ""
    """Why the environment itself failed, for the log; the episode is then left out."""


class Environment:
    """The environment of all episodes of a rank's engine. All ranks of an engine make the same calls.

    `open` and `answer` lead to one observation each, which `poll` returns. This class ends every episode with its first
    response; a subclass returns more from `reply`, or replaces the other methods (`rl/agents.py`).
    """

    turn_tokens = 0
    """Most tokens of a response; 0: all that the episode has left."""
    most_open = 0
    """Most episodes that are open at once, though one group of samples always is; 0: no limit."""
    remote = False
    """True if other processes answer: that takes a while, and only the engine's first rank gets the answers."""

    def __init__(self):
        self.ready: list[tuple[Place, Observation]] = []

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """Answer the episode's last response; None ends the episode.

        Called after a response that ended by itself (`stop`), on every rank of an engine; the answer must be the same
        on all of them and however often the episode is run.
        """
        return None

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Begin an episode. One that began in an earlier step goes on, and gets no observation."""
        if not episode.segments:
            self.ready.append((place_of(episode), Observation(list(group.prompt.tokens))))

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Take the episode's last response. finish: how the engine ended it, `stop` or `length`."""
        seen = self.reply(group.prompt, episode) if finish == "stop" else Observation(over=finish)
        if seen is None:
            seen = Observation(over="stop")
        elif not seen.over and plan.room(episode) <= len(seen.tokens):
            # No token is left for a response to it.
            seen = Observation(over="length")
        self.ready.append((place_of(episode), seen))

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """Return the observations that have come; wait up to `wait` seconds for the first if any is due."""
        ready, self.ready = self.ready, []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """Drop episodes that are cut short. keep: another step goes on with them, so keep what they need."""

    def take_counts(self) -> dict[str, float]:
        """Return sums of what happened since the last call, by name; the names are always the same."""
        return {}

    def close(self) -> None:
        """End all processes. May be called twice."""


class OnFirstRank(Environment):
    """A remote environment on the other ranks of an engine, which get the first rank's observations by `share`."""

    remote = True

    def __init__(self, turn_tokens: int, most_open: int):
        super().__init__()
        self.turn_tokens, self.most_open = turn_tokens, most_open

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Do nothing: the first rank opens it."""

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Do nothing: the first rank answers."""


def share(seen: list[tuple[Place, Observation]], world: World) -> list[tuple[Place, Observation]]:
    """Return the observations of the engine's first rank on all of its ranks. Collective over the engine."""
    text = json.dumps([(place, vars(each)) for place, each in seen])
    rows = json.loads(broadcast_text(text, world.engine_group, world.device))
    return [((position, sample), Observation(**each)) for (position, sample), each in rows]


def describe_environment(stats: Metrics, counts: dict[str, float]) -> None:
    """Add `env/*` and two times to a step's numbers (docs/metrics.md). counts: sums over all engines, as in COUNTS."""
    episodes, turns = max(1.0, counts["episodes"]), max(1.0, counts["turns"])
    stats.add("env/turns", counts["whole_turns"] / episodes)
    stats.add("env/calls", counts["whole_calls"] / episodes)
    for name in ("failed_calls", "malformed", "timeouts", "cut", "forks", "failures"):
        stats.add(f"env/{name}", counts[name])
    stats.add("time/env_answer", counts["seconds"] / turns)
    stats.add("time/env_idle", counts["idle"])


def place_of(episode: Episode) -> Place:
    """Return the name of an episode inside a rollout."""
    return episode.position, episode.sample
