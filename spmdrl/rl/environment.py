"""Environment interface: environments start episodes, answer each response with an observation, and end episodes."""

import json
from dataclasses import dataclass, field

import torch

from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt
from spmdrl.data.segment import Shown
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.exchange import broadcast_rows, broadcast_text
from spmdrl.spmd.payload import fetch
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics

COUNTS = (
    *("episodes", "turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures"),
    *("whole_turns", "whole_calls", "seconds", "idle"),
)
"""Names of the counters that an environment keeps during a rollout. episodes: episodes that ended without a failure;
whole_turns and whole_calls: turns and tool calls in those episodes. seconds: total time spent on answers; idle: seconds
that an engine spent only waiting for answers."""
Place = tuple[int, int]
"""(position, sample): identifies an episode within a rollout."""


@dataclass
class Observation:
    """The start of an episode, an environment's answer to a response, or the end of an episode."""

    tokens: list[int] = field(default_factory=list)
    """Tokens to append to the episode before the policy continues. At the start of an episode, the prompt."""
    state: int | None = None
    """Number of the environment's state after this answer, less than `data.episode.STATES`. The prompt has state 0.
    None if the environment does not name states; the state is then all tokens so far."""
    anew: bool = False
    """True if the tokens are a complete new prompt. The episode then continues in a branch (`Episode.fork`)."""
    over: str = ""
    """Reason why the episode ends with this observation (`FINISH_REASONS`); empty if it continues."""
    reward: float = 0.0
    """Reward for the turn that this observation answers."""
    given: float | None = None
    """At the end of an episode, the unweighted sum of the environment's rewards, or None if it gives no rewards."""
    parts: dict[str, float] = field(default_factory=dict)
    """At the end of an episode, the parts of the final reward by name."""
    failure: str = ""
    """Reason why the environment failed, for the log; empty if it did not fail. Failed episodes are dropped."""
    images: Shown = ()
    """Images that the tokens show. Their placeholders are expanded."""


class Environment:
    """Environment for all episodes of a rank's engine. All ranks of an engine must make the same calls.

    Each call of `answer` produces one observation, and so does each call of `open` for a new episode. `poll` returns
    these observations later. This class ends every episode after the first response. A subclass may override `reply` to
    continue episodes, or override the other methods (`rl/agents.py`).
    """

    turn_tokens = 0
    """Maximum number of tokens per response, or 0 if only the complete episode has a limit."""
    most_open = 0
    """Maximum number of open episodes, or 0 for no limit. A single group of samples may exceed this limit."""
    remote = False
    """True if other processes answer. Answers are then asynchronous, and only the engine's first rank gets them."""

    def __init__(self, images: ImageReader | None = None):
        """images: reads the images of prompts; None if the model reads text only."""
        self.images = images
        self.ready: list[tuple[Place, Observation]] = []

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        """Return the answer to the episode's last response, or None to end the episode.

        This is called on every rank of an engine, after a response with finish reason `stop`. The answer must be the
        same on all ranks and every time the episode is replayed.
        """
        return None

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Start an episode. An episode that started in an earlier step resumes without an observation."""
        if not episode.segments:
            try:
                shown = self.images.read_again(group.prompt.images) if self.images else ()
            except ValueError as error:
                raise ValueError(f"row {group.prompt.index} of the prompts: {error}") from error
            self.ready.append((place_of(episode), Observation(list(group.prompt.tokens), images=shown)))

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Process the episode's last response. finish: the engine's finish reason, `stop` or `length`."""
        seen = self.reply(group.prompt, episode) if finish == "stop" else Observation(over=finish)
        if seen is None:
            seen = Observation(over="stop")
        elif not seen.over and plan.room(episode) <= len(seen.tokens):
            # No tokens are left for a response to the observation.
            seen = Observation(over="length")
        self.ready.append((place_of(episode), seen))

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """Return the observations that have arrived. Wait up to `wait` seconds for the first if any are pending."""
        ready, self.ready = self.ready, []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """Close episodes that are cut short. keep: True to keep their state, so that a later step can resume them."""

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, by the names in COUNTS, or an empty dict if nothing is counted."""
        return {}

    def close(self) -> None:
        """Stop all processes. This method may be called twice."""


class OnFirstRank(Environment):
    """Stand-in for a remote environment on all ranks of an engine except the first.

    These ranks get the first rank's observations through `share`.
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
    """Broadcast the observations from the engine's first rank to all ranks of the engine, and return them. Collective.

    Tokens and images are broadcast as tensors. Rewards, reward parts and failure messages are broadcast as text.
    """
    group, device = world.engine_group, world.device
    facts = [
        (
            place,
            len(each.tokens),
            vars(each) | {"tokens": [], "images": [(at, image.name) for at, image in each.images]},
        )
        for place, each in seen
    ]
    text = broadcast_text(json.dumps(facts) if facts else "", group, device)
    if not text:
        return []
    tokens_T = broadcast_rows(
        torch.tensor([t for _, each in seen for t in each.tokens], dtype=torch.int64), group, device
    )
    facts = json.loads(text)
    held = {image.name: image for _, each in seen for _, image in each.images}
    wanted = list(dict.fromkeys(name for _, _, fields in facts for _, name in fields["images"]))
    found = fetch(held, wanted, Peers(group, device)) if wanted else {}
    tokens, out = tokens_T.split([count for _, count, _ in facts]), []
    for ((position, sample), _, fields), tokens_N in zip(facts, tokens, strict=True):
        shown = tuple((at, found[name]) for at, name in fields["images"])
        out.append(((position, sample), Observation(**fields | {"tokens": tokens_N.tolist(), "images": shown})))
    return out


def describe_environment(stats: Metrics, counts: dict[str, float]) -> None:
    """Add the metrics `env/*`, `time/env_answer` and `time/env_idle` (docs/metrics.md).

    counts: the counters named in COUNTS, summed over all engines.
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
