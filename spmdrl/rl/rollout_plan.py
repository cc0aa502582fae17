"""Plans of rollouts, the groups of episodes that they sample, and the experience that comes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt
from spmdrl.engines.engine import Key, Request
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.seeds import seed_for
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics

ASK_EVERY = 16
"""Steps of an engine of several ranks between two agreements of these whether to abandon the rollout."""


@dataclass
class PromptGroup:
    """Episodes of one prompt, all of them with one engine."""

    position: int
    """Number of the prompt among all that the run draws: tells apart a prompt drawn twice."""
    prompt: Prompt
    born: int
    """Step in which the prompt was drawn."""
    episodes: list[Episode]
    """Episodes in the order of their samples; the greedy one, if there is one, is the last."""

    @property
    def done(self) -> bool:
        """True if all episodes are finished."""
        return all(e.finish for e in self.episodes)

    @property
    def open(self) -> list[Episode]:
        """Episodes that are not finished."""
        return [e for e in self.episodes if not e.finish]

    def copy(self) -> "PromptGroup":
        """Return a group to go on with, apart from this one; segments are never written into."""
        return replace(
            self,
            episodes=[
                replace(e, segments=list(e.segments), conversation=e.conversation and e.conversation.copy())
                for e in self.episodes
            ],
        )


@dataclass
class Experience:
    """Episodes that one rollout, or all rollouts of a step, completed on this rank, and the groups that go on.

    In a step's experience the positions of episodes are 0 .. prompts - 1 over all ranks.
    """

    episodes: list[Episode]
    """Episodes of whole groups; empty on an engine's other ranks."""
    drawn: int = 0
    """Number of prompts up to the last one that was begun: of a rollout by this engine, of a step by any. The next step
    draws the later ones. Known to the ranks that sample."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups that were cut short on this rank's engine, or drawn and not begun there; alike on all ranks of the
    engine."""
    bad_samples: int = 0
    """Samples left out on this rank because a reward or logp was not finite, they could not be graded, or all others of
    their prompt were left out and the advantage compares them."""
    stats: Metrics = field(default_factory=Metrics)
    counts: dict[str, float] = field(default_factory=dict)
    """Sums of what environments did on this rank."""
    abandoned: bool = False
    """True if the rollout was abandoned; its episodes are then of use only if the plan keeps what is graded."""


@dataclass
class RolloutPlan:
    """Prompts to sample and the settings for it. Every rank holds the same plan, except for `carried`."""

    name: str
    """Name that is unique in the run; the queue carries it."""
    prompts: list[Prompt]
    """Prompts in the order of their positions."""
    samples: int
    """Samples per prompt."""
    key: tuple[int, ...]
    """Key of the draws of this rollout: (seed, step) and more."""
    version: int
    max_new_tokens: int
    """Limit on the new tokens of all turns of an episode, observations included."""
    temperature: float
    top_p: float = 1.0
    assignment: str = "queue"
    first_position: int = 0
    """Number of the first prompt."""
    greedy: bool = False
    """True for one more response to every prompt, a greedy one, whose reward becomes the others' baseline."""
    bad_sample: str = "stop"
    """Treatment of a sample with a logp or reward that is not finite: an error (`stop`), or the reward nan (`skip`)."""
    enough: int = 0
    """Number of groups over all engines after which the rest is cut short. 0: all there are."""
    least: int = 1
    """Samples of a group whose environment may not fail if the group is to count towards `enough`."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups that this rank's engine goes on with; first in line."""
    carried_by: list[int] = field(default_factory=list)
    """Number of groups that each engine goes on with; empty: none does."""
    turn_tokens: int = 0
    """Limit on the tokens of one response; 0: none."""
    in_order: bool = False
    """True if the engine waits for all due observations before each step and gets requests by place, so that no clock
    decides what is cut or what runs side by side."""
    keeps_cut: bool = False
    """True if another step goes on with groups that are cut short."""
    must_end: int = -1
    """Groups born in this step or before are always awaited, whatever `enough` is."""
    may_end: Callable[[], bool] | None = None
    """Called between two steps of the engine, and of the grading: True abandons the rollout."""
    keeps_graded: bool = False
    """True if groups that are graded count although the rollout was abandoned."""

    @property
    def requests_per_prompt(self) -> int:
        """Requests for one prompt: its samples, and the greedy one."""
        return self.samples + self.greedy

    def group(self, place: int) -> PromptGroup:
        """Return the prompt at this place, with episodes that have not begun."""
        prompt, position = self.prompts[place], self.first_position + place
        episodes = [Episode(prompt.index, sample, position, []) for sample in range(self.requests_per_prompt)]
        return PromptGroup(position, prompt, self.key[-1], episodes)

    def counts(self, group: PromptGroup) -> bool:
        """Return True if few enough environments of a finished group failed for it to count towards `enough`."""
        failed = [e.finish == "abort" for e in group.episodes]
        return failed[: self.samples].count(False) >= self.least and not any(failed[self.samples :])

    def room(self, episode: Episode) -> int:
        """Return the number of tokens that an episode may still take."""
        return self.max_new_tokens - episode.generated

    def room_of_turn(self, episode: Episode) -> int:
        """Return the number of tokens that the current response may still take."""
        room = self.room(episode)
        return min(room, self.turn_tokens - len(episode.response)) if self.turn_tokens else room

    def request(self, group: PromptGroup, sample: int) -> Request:
        """Return the request for the rest of a sample. Its seed depends on data alone, not on where it runs."""
        episode = group.episodes[sample]
        return Request(
            key=request_key(episode),
            prompt=episode.tokens.tolist(),
            seed=seed_for(*self.key, group.prompt.index, group.position, sample, episode.generated),
            version=self.version,
            max_new_tokens=self.room_of_turn(episode),
            temperature=0.0 if self.greedy and sample == self.samples else self.temperature,
            top_p=self.top_p,
        )

    def is_abandoned(self, world: World, polls: int) -> bool:
        """Return True if the rollout is abandoned, alike on all ranks of an engine. Collective over them.

        polls: steps of the engine so far.
        """
        if self.may_end is None:
            return False
        if world.engine_group is None:
            return self.may_end()
        if polls % ASK_EVERY:
            return False
        flag = torch.tensor([int(self.may_end())], device=world.device)
        return bool(all_reduce(flag, "max", world.engine_group).item())

    def unbegun(self, done: Experience, last: int, world: World) -> list[PromptGroup]:
        """Return this engine's groups among the first `last` prompts that it did not begin; none if a queue hands out.

        A fixed assignment leaves them if another engine was quicker; no other engine may begin them.
        """
        if self.assignment != "static":
            return []
        return [self.group(p) for p in range(world.engine_index, last, world.engine_count) if p >= done.drawn]

    def enough_here(self, world: World) -> int:
        """Return the groups that this engine must complete (static assignment), or all engines together (queue)."""
        if self.assignment != "static" or not self.enough:
            return self.enough
        engines = world.engine_count
        carried = self.carried_by or [0] * engines
        drawn = [len(range(engine, len(self.prompts), engines)) for engine in range(engines)]
        mine = shares(self.enough, [c + d for c, d in zip(carried, drawn, strict=True)])[world.engine_index]
        # 0 would mean that there is no limit: an engine whose share is 0 stops at its first group.
        return max(1, mine)


def request_key(episode: Episode) -> Key:
    """Return the name of the request for an episode's next tokens inside a rollout."""
    return episode.position, episode.sample, episode.turns - 1


def shares(enough: int, groups: list[int]) -> list[int]:
    """Divide `enough` groups among engines in proportion to the groups that each has, never more than those.

    They add up to `enough`, or to all groups if those are fewer.
    """
    total, ends = sum(groups), [0, *accumulate(groups)]
    # Cumulative numbers are rounded, so that nothing is lost in rounding.
    marks = [min(enough, total) * end // max(1, total) for end in ends]
    return [after - before for before, after in pairwise(marks)]
