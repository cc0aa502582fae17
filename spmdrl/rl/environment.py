"""The interface of environments: they begin episodes, answer each response with an observation, and end episodes."""

import json
from dataclasses import dataclass, field

import torch

from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.spmd.exchange import broadcast_rows, broadcast_text
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics

COUNTS = (
    *("episodes", "turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures"),
    *("whole_turns", "whole_calls", "seconds", "idle"),
)
"""Names of an environment's counts in a rollout. episodes: episodes that ended without a failure; whole_turns and
whole_calls: turns and calls of those episodes. seconds: total duration of all answers; idle: seconds in which an engine
only waited for answers."""
Place = tuple[int, int]
"""(position, sample): identifies an episode within a rollout."""


@dataclass
class Observation:
    """The start of an episode, an environment's answer to a response, or the end of an episode."""

    tokens: list[int] = field(default_factory=list)
    """Tokens to append to the episode, after which the policy continues. At the start of an episode: the prompt."""
    state: int | None = None
    """Number of the environment's state after this answer, below `data.episode.STATES`; the state of the prompt has
    number 0. None: the environment does not name states, so all tokens so far are the state."""
    anew: bool = False
    """True if the tokens are a complete prompt, with which the episode continues in a branch (`Episode.fork`)."""
    over: str = ""
    """Reason for which the episode ends with this observation (`FINISH_REASONS`); empty if it continues."""
    reward: float = 0.0
    """Reward for the turn that this observation answers."""
    given: float | None = None
    """At the end of an episode: unweighted sum of the environment's rewards. None: the environment has no rewards."""
    parts: dict[str, float] = field(default_factory=dict)
    """At the end of an episode: the parts of the final reward, by name."""
    failure: str = ""
    """Reason for which the environment failed, for the log; the episode is then left out. Empty: it did not fail."""


class Environment:
    """The environment of all episodes of a rank's engine. All ranks of an engine make the same calls.

    Each call of `answer`, and of `open` for a new episode, leads to one observation, which `poll` returns later. This
    class ends every episode after the first response. A subclass may override `reply` to return further observations,
    or override the other methods (`rl/agents.py`).
    """

    turn_tokens = 0
    """Maximum number of tokens of a response; 0: only the limit on the complete episode applies."""
    most_open = 0
    """Maximum number of open episodes; a single group of samples may exceed it. 0: no limit."""
    remote = False
    """True if other processes answer. Answers then take time, and only the engine's first rank gets them."""

    def __init__(self):
        self.ready: list[tuple[Place, Observation]] = []

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """Return the answer to the episode's last response, or None to end the episode.

        This is called on every rank of an engine, after a response with the finish reason `stop`. The answer must
        be the same on all ranks and whenever the episode is run again.
        """
        return None

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Begin an episode. An episode that began in an earlier step continues without an observation."""
        if not episode.segments:
            self.ready.append((place_of(episode), Observation(list(group.prompt.tokens))))

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Receive the episode's last response. finish: how the engine ended the response, `stop` or `length`."""
        seen = self.reply(group.prompt, episode) if finish == "stop" else Observation(over=finish)
        if seen is None:
            seen = Observation(over="stop")
        elif not seen.over and plan.room(episode) <= len(seen.tokens):
            # No tokens are left for a response to the observation.
            seen = Observation(over="length")
        self.ready.append((place_of(episode), seen))

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """Return the observations that have arrived; wait up to `wait` seconds for the first one if any is pending."""
        ready, self.ready = self.ready, []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """Close episodes that are cut short. keep: True to keep their state, because another step continues them."""

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call by name (COUNTS), or nothing for an environment that does not count."""
        return {}

    def close(self) -> None:
        """Stop all processes. This method may be called twice."""


class OnFirstRank(Environment):
    """Stand-in for a remote environment on an engine's other ranks.

    They get the first rank's observations by `share`.
    """

    remote = True

    def __init__(self, turn_tokens: int, most_open: int):
        super().__init__()
        self.turn_tokens, self.most_open = turn_tokens, most_open

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Do nothing, because the first rank opens the episode."""

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Do nothing, because the first rank answers the response."""


def share(seen: list[tuple[Place, Observation]], world: World) -> list[tuple[Place, Observation]]:
    """Return the observations of the engine's first rank on all of its ranks. Collective over the engine.

    Tokens are broadcast as a tensor; rewards, named parts and the text of a failure as text.
    """
    group, device = world.engine_group, world.device
    facts = [(place, len(each.tokens), vars(each) | {"tokens": []}) for place, each in seen]
    text = broadcast_text(json.dumps(facts) if facts else "", group, device)
    if not text:
        return []
    tokens_T = broadcast_rows(
        torch.tensor([t for _, each in seen for t in each.tokens], dtype=torch.int64), group, device
    )
    facts = json.loads(text)
    tokens = tokens_T.split([count for _, count, _ in facts])
    return [
        ((position, sample), Observation(**fields | {"tokens": tokens_N.tolist()}))
        for ((position, sample), _, fields), tokens_N in zip(facts, tokens, strict=True)
    ]


def describe_environment(stats: Metrics, counts: dict[str, float]) -> None:
    """Add the metrics `env/*`, `time/env_answer` and `time/env_idle` (docs/metrics.md).

    counts: the value of each name in COUNTS, summed over all engines.
    """
    episodes, turns = max(1.0, counts["episodes"]), max(1.0, counts["turns"])
    stats.add("env/turns", counts["whole_turns"] / episodes)
    stats.add("env/calls", counts["whole_calls"] / episodes)
    for name in ("failed_calls", "malformed", "timeouts", "cut", "forks", "failures"):
        stats.add(f"env/{name}", counts[name])
    stats.add("time/env_answer", counts["seconds"] / turns)
    stats.add("time/env_idle", counts["idle"])


def place_of(episode: Episode) -> Place:
    """Return the (position, sample) of an episode."""
    return episode.position, episode.sample
