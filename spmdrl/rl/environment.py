"""The other side of an episode: it begins the episode, answers each response with an observation, and ends it."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from spmdrl.data.episode import FINISH_REASONS, Episode
from spmdrl.data.prompts import Prompt
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics

COUNTS = (
    *("episodes", "turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures"),
    *("whole_turns", "whole_calls", "seconds", "idle"),
)
"""Sums that a rollout tells. episodes: that ended without a failure, whole_turns and whole_calls: theirs. seconds: of
answers, over all turns; idle: in which an engine only waited for them."""
HEAD = 7
"""Numbers of an observation before its tokens: position, sample, finish, state, anew, failed, count of tokens."""
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
    remote: bool
    """True where it answers from other processes: it takes a while, and answers the engine's first rank alone."""

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


class SingleTurn:
    """The environment that ends an episode with its first response, unless a subclass returns more from `reply`."""

    turn_tokens = most_open = 0
    remote = False

    def __init__(self):
        self.ready: list[tuple[Place, Observation]] = []

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """The answer to the episode's last response, or None where the episode is over.

        Called once a response has ended by itself (`stop`), on every rank of an engine; it must answer alike on all of
        them and however often the episode is run.
        """
        return None

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """See the contract."""
        if not episode.segments:
            self.ready.append((place_of(episode), Observation(list(group.prompt.tokens))))

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """See the contract."""
        seen = self.reply(group.prompt, episode) if finish == "stop" else Observation(over=finish)
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


class OnFirstRank(SingleTurn):
    """A remote environment as the other ranks of an engine have it: the first rank's answers come by `share`."""

    remote = True

    def __init__(self, turn_tokens: int, most_open: int):
        super().__init__()
        self.turn_tokens, self.most_open = turn_tokens, most_open

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """The first rank does it."""

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """The first rank does it."""


def share(seen: list[tuple[Place, Observation]], world: World) -> list[tuple[Place, Observation]]:
    """Returns the observations of the engine's first rank on all of its ranks, broadcast as tensors. Collective.

    Other ranks do not get parts of rewards and texts of failures.
    """
    # NCCL carries tensors of the device alone.
    group, device, leads = world.engine_group, world.device, world.engine_tp_rank == 0
    numbers, rewards = (column.to(device) for column in packed(seen))
    sizes = torch.tensor([len(numbers), len(rewards)], device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    of_numbers, of_rewards = sizes.tolist()
    if not of_numbers:
        return []
    if not leads:
        numbers = torch.empty(of_numbers, dtype=torch.int64, device=device)
        rewards = torch.empty(of_rewards, dtype=torch.float64, device=device)
    dist.broadcast(numbers, group=group, group_src=0)
    dist.broadcast(rewards, group=group, group_src=0)
    return seen if leads else unpacked(numbers, rewards)


def packed(seen: list[tuple[Place, Observation]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns observations as one row of whole numbers, int64, and one of rewards, float64."""
    numbers, rewards = [], []
    for (position, sample), each in seen:
        finish = FINISH_REASONS.index(each.over) if each.over else -1
        state = -1 if each.state is None else each.state
        numbers += [position, sample, finish, state, each.anew, bool(each.failure), len(each.tokens), *each.tokens]
        rewards += [each.reward, math.nan if each.given is None else each.given]
    return torch.tensor(numbers, dtype=torch.int64), torch.tensor(rewards, dtype=torch.float64)


def unpacked(numbers: torch.Tensor, rewards: torch.Tensor) -> list[tuple[Place, Observation]]:
    """Returns the observations that `packed` packed, without parts and texts."""
    out, at, row = [], 0, numbers.tolist()
    for reward, given in rewards.view(-1, 2).tolist():
        position, sample, finish, state, anew, failed, count = row[at : at + HEAD]
        tokens = row[at + HEAD : at + HEAD + count]
        at += HEAD + count
        each = Observation(
            tokens,
            None if state < 0 else state,
            bool(anew),
            FINISH_REASONS[finish] if finish >= 0 else "",
            reward,
            None if math.isnan(given) else given,
            failure="it failed" if failed else "",
        )
        out.append(((position, sample), each))
    return out


def describe_environment(stats: Metrics, counts: dict[str, float]) -> None:
    """Adds `env/*` and two times to a step's numbers (docs/metrics.md). counts: sums over all engines, as in COUNTS."""
    episodes, turns = max(1.0, counts["episodes"]), max(1.0, counts["turns"])
    stats.add("env/turns", counts["whole_turns"] / episodes)
    stats.add("env/calls", counts["whole_calls"] / episodes)
    for name in ("failed_calls", "malformed", "timeouts", "cut", "forks", "failures"):
        stats.add(f"env/{name}", counts[name])
    stats.add("time/env_answer", counts["seconds"] / turns)
    stats.add("time/env_idle", counts["idle"])


def place_of(episode: Episode) -> Place:
    """Returns the name of an episode inside a rollout."""
    return episode.position, episode.sample
