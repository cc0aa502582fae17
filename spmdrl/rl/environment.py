"""The other side of an episode: it begins the episode, answers each response with an observation, and ends it."""

from dataclasses import dataclass, field
from typing import Protocol

from spmdrl.data.episode import Episode
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.tracking.metrics import Metrics

COUNTS = (
    *("episodes", "turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures"),
    *("seconds", "idle"),
)
"""Sums that a rollout tells. seconds: of answers, over all turns; idle: in which an engine only waited for them."""
Place = tuple[int, int]
"""(position, sample): the name of an episode inside a rollout."""


@dataclass
class Observation:
    """An environment's answer to a response, the beginning of an episode, or its end."""

    tokens: list[int] = field(default_factory=list)
    """Appended to the episode as they are; the policy goes on after them. At the beginning: the prompt."""
    state: int | None = None
    """Number of the state that they show, below `data.episode.STATES`; 0 is the state that the prompt shows. None: the
    whole episode so far is the state."""
    anew: bool = False
    """True where the tokens are a whole prompt, from which the episode goes on in a branch (`Episode.fork`)."""
    over: str = ""
    """Reason for which the episode ends here (`FINISH_REASONS`); empty where it goes on."""
    reward: float = 0.0
    """Reward that fell in the turn that is answered."""
    given: float | None = None
    """At the end: all that the environment gave, unweighted. None: there is no environment that gives rewards."""
    parts: dict[str, float] = field(default_factory=dict)
    """At the end: parts of the final reward."""
    failure: str = ""
    """The environment itself failed: the episode is left out. In words, for the log."""


class Environment(Protocol):
    """The other side of all episodes of a rank's engine. All ranks of an engine make the same calls.

    `open` and `answer` are answered by one observation each, which `poll` returns.
    """

    turn_tokens: int
    """Most tokens of a response; 0: all that the episode has left."""
    most_open: int
    """Most episodes that are open at once, though one group of samples always is; 0: no limit."""
    opens_later: bool
    """True where the observation with which an episode begins takes a while."""

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Begin an episode. One that has begun (in an earlier step) goes on, and has no observation."""
        ...

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Take the episode's last response. finish: as the engine ended it, `stop` or `length`."""
        ...

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """Return what is there; waits up to `wait` seconds for the first where something is owed."""
        ...

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """Let go of episodes that are cut short. keep: another step goes on with them, so what they need is kept."""
        ...

    def take_counts(self) -> dict[str, float]:
        """Return sums of what happened since the last call, by name; the names are always the same."""
        ...

    def close(self) -> None:
        """End all processes. May be called twice."""
        ...


class Replies(Protocol):
    """An environment in the process itself that answers at once."""

    def reply(self, prompt, episode: Episode) -> Observation | None:
        """The answer to the episode's last response, or None where the episode is over.

        It is asked once a response has ended by itself (`stop`), on every rank of an engine, and must answer alike on
        all of them and however often the episode is run.
        """
        ...


class SingleTurn:
    """Ends an episode with its first response."""

    def reply(self, prompt, episode: Episode) -> Observation | None:
        """See the contract."""
        return None


class AtOnce:
    """An `Environment` of one that replies at once."""

    turn_tokens = most_open = 0
    opens_later = False

    def __init__(self, replies: Replies):
        self.replies = replies
        self.ready: list[tuple[Place, Observation]] = []

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """See the contract."""
        if not episode.segments:
            self.ready.append((place_of(episode), Observation(list(group.prompt.tokens))))

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """See the contract."""
        seen = self.replies.reply(group.prompt, episode) if finish == "stop" else Observation(over=finish)
        if seen is None:
            seen = Observation(over="stop")
        elif not seen.over and plan.room(episode) <= len(seen.tokens):
            # No token is left for a response to it.
            seen = Observation(over="length")
        self.ready.append((place_of(episode), seen))

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """See the contract."""
        ready, self.ready = self.ready, []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """See the contract: an episode needs nothing but its tokens."""

    def take_counts(self) -> dict[str, float]:
        """See the contract."""
        return {}

    def close(self) -> None:
        """See the contract: there are none."""


def describe_environment(stats: Metrics, counts: dict[str, float]) -> None:
    """Adds `env/*` and two times to a step's numbers (docs/metrics.md). counts: sums over all engines, as in COUNTS."""
    episodes, turns = max(1.0, counts["episodes"]), max(1.0, counts["turns"])
    stats.add("env/turns", counts["turns"] / episodes)
    stats.add("env/calls", counts["calls"] / episodes)
    for name in ("failed_calls", "malformed", "timeouts", "cut", "forks", "failures"):
        stats.add(f"env/{name}", counts[name])
    stats.add("time/env_answer", counts["seconds"] / turns)
    stats.add("time/env_idle", counts["idle"])


def place_of(episode: Episode) -> Place:
    """Returns the name of an episode inside a rollout."""
    return episode.position, episode.sample
