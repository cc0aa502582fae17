"""Rollout plans, the groups of episodes that they sample, and the experience that rollouts return.

A carried group is a group that one rollout cut short or did not start, and that a later rollout continues.
"""

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
"""The ranks of an engine decide together, once per this number of polls, whether to abandon the rollout."""


@dataclass
class PromptGroup:
    """The episodes of one prompt, all on the same engine."""

    position: int
    """Index of this draw among all prompt draws of the run. A prompt that is drawn twice has two positions."""
    prompt: Prompt
    born: int
    """Step in which the prompt was drawn, or the constant `evaluation.EVALUATION` in an evaluation."""
    episodes: list[Episode]
    """Episodes in sample order. The greedy episode, if there is one, comes last."""

    @property
    def done(self) -> bool:
        """True if all episodes are finished."""
        return all(e.finish for e in self.episodes)

    @property
    def open(self) -> list[Episode]:
        """Episodes that are not finished."""
        return [e for e in self.episodes if not e.finish]

    def copy(self) -> "PromptGroup":
        """Return a copy that can continue without changing this group. Segments are shared, as they are immutable."""
        return replace(
            self,
            episodes=[
                replace(e, segments=list(e.segments), conversation=e.conversation and e.conversation.copy())
                for e in self.episodes
            ],
        )


@dataclass
class Experience:
    """The result of one rollout, or of all rollouts of a step: completed episodes and carried groups of this rank.

    In a step's experience, the episodes on all ranks together have positions 0 to prompts - 1.
    """

    episodes: list[Episode]
    """Episodes of complete groups, on an engine's first rank; empty on its other ranks."""
    drawn: int = 0
    """Number of prompts up to and including the last prompt that was started by this engine (for a rollout) or by any
    engine (for a step). The next step continues after that prompt. 0 on ranks that do not sample."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups to continue later. This rank's engine cut them short, or drew them but did not start them. Equal on all
    ranks of an engine."""
    bad_samples: int = 0
    """Number of samples dropped on this rank, because a reward or logp is not finite, a sample could not be graded, or
    the advantage compares samples and all other samples of the prompt were dropped."""
    stats: Metrics = field(default_factory=Metrics)
    counts: dict[str, float] = field(default_factory=dict)
    """Environment counters on this rank (`environment.COUNTS`)."""
    abandoned: bool = False
    """True if the rollout was abandoned. The rollout's episodes are then used only if `RolloutPlan.keeps_graded` is
    set."""


@dataclass
class RolloutPlan:
    """The prompts to sample from, and the sampling settings. Every rank has the same plan, except for `carried`."""

    name: str
    """Name that is unique in the run. The prompt queue uses it as a key."""
    prompts: list[Prompt]
    """Prompts in order of position."""
    samples: int
    """Number of samples per prompt."""
    key: tuple[int, ...]
    """Seed key of this rollout: the run's seed, and the step or a constant."""
    version: int
    max_new_tokens: int
    """Maximum number of new tokens per episode over all turns, including observations."""
    temperature: float
    top_p: float = 1.0
    assignment: str = "queue"
    first_position: int = 0
    """Position of the first prompt; the others are numbered consecutively."""
    greedy: bool = False
    """True to also sample a greedy response to every prompt. Its reward is the baseline for the prompt's other
    samples."""
    bad_sample: str = "stop"
    """How to treat a sample whose logp or reward is not finite: raise an error (`stop`) or set its reward to nan
    (`skip`)."""
    enough: int = 0
    """Number of groups that all engines together complete before the rest is cut short, or 0 to complete all groups."""
    least: int = 1
    """A group counts towards `enough` if the environments of at least this many of its samples did not fail."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups of earlier steps that this rank's engine continues before it takes new prompts."""
    carried_by: list[int] = field(default_factory=list)
    """Number of carried groups per engine; empty if no engine has any."""
    turn_tokens: int = 0
    """Maximum number of tokens per response, or 0 if only the complete episode has a limit."""
    in_order: bool = False
    """True if the engine waits for all pending observations before each step and gets requests sorted by (position,
    sample). Timing then affects neither the engine's batches nor the choice of episodes to cut short."""
    keeps_cut: bool = False
    """True if groups that are cut short are continued in a later step."""
    must_end: int = -1
    """Groups whose prompts were drawn in this step or earlier are completed regardless of `enough`. -1 for none."""
    may_end: Callable[[], bool] | None = None
    """Callback that is called between engine steps and while rewards are pending. If the callback returns True, the
    rollout is abandoned."""
    keeps_graded: bool = False
    """True if an abandoned rollout still returns the groups that were graded before it was abandoned."""

    @property
    def requests_per_prompt(self) -> int:
        """Number of requests per prompt: its samples, plus the greedy response if there is one."""
        return self.samples + self.greedy

    def group(self, place: int) -> PromptGroup:
        """Return a new group of unstarted episodes for the prompt at index `place` in `prompts`."""
        prompt, position = self.prompts[place], self.first_position + place
        episodes = [Episode(prompt.index, sample, position, []) for sample in range(self.requests_per_prompt)]
        return PromptGroup(position, prompt, self.key[-1], episodes)

    def counts(self, group: PromptGroup) -> bool:
        """Return True if a finished group counts towards `enough`, which depends on how many environments failed."""
        failed = [e.finish == "abort" for e in group.episodes]
        return failed[: self.samples].count(False) >= self.least and not any(failed[self.samples :])

    def room(self, episode: Episode) -> int:
        """Return the maximum number of tokens that may still be added to an episode."""
        return self.max_new_tokens - episode.generated

    def room_of_turn(self, episode: Episode) -> int:
        """Return the maximum number of tokens that may still be added to the current response."""
        room = self.room(episode)
        return min(room, self.turn_tokens - len(episode.response)) if self.turn_tokens else room

    def request(self, group: PromptGroup, sample: int) -> Request:
        """Return the request for a sample's next tokens. The request's seed depends only on data, not on the engine."""
        episode = group.episodes[sample]
        return Request(
            key=request_key(episode),
            prompt=episode.tokens.tolist(),
            seed=seed_for(*self.key, group.prompt.index, group.position, sample, episode.generated),
            version=self.version,
            max_new_tokens=self.room_of_turn(episode),
            temperature=0.0 if self.greedy and sample == self.samples else self.temperature,
            top_p=self.top_p,
            images=episode.images,
        )

    def is_abandoned(self, world: World, polls: int) -> bool:
        """Return True on all ranks of an engine if the rollout is abandoned. Collective over the engine.

        polls: number of calls in this rollout so far.
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
        """Return this engine's groups among the first `last` prompts that it has not started.

        Such groups exist only under static assignment, when another engine was faster. No other engine may start them.
        With a queue, the list is empty.
        """
        if self.assignment != "static":
            return []
        return [self.group(p) for p in range(world.engine_index, last, world.engine_count) if p >= done.drawn]

    def enough_here(self, world: World) -> int:
        """Return how many groups this engine (static assignment) or all engines together (queue) must complete."""
        if self.assignment != "static" or not self.enough:
            return self.enough
        engines = world.engine_count
        carried = self.carried_by or [0] * engines
        drawn = [len(range(engine, len(self.prompts), engines)) for engine in range(engines)]
        mine = shares(self.enough, [c + d for c, d in zip(carried, drawn, strict=True)])[world.engine_index]
        # 0 would mean all groups, so an engine whose share is 0 completes one group.
        return max(1, mine)


def request_key(episode: Episode) -> Key:
    """Return the request key for an episode's next tokens, unique within a rollout."""
    return episode.position, episode.sample, episode.turns - 1


def shares(enough: int, groups: list[int]) -> list[int]:
    """Divide `enough` groups among the engines, in proportion to how many groups each engine has.

    The shares add up to `enough`, or to the number of groups if that is smaller. No share exceeds the engine's own
    number of groups.
    """
    total, ends = sum(groups), [0, *accumulate(groups)]
    # Cumulative sums are rounded instead of shares, so that the shares add up exactly.
    marks = [min(enough, total) * end // max(1, total) for end in ends]
    return [after - before for before, after in pairwise(marks)]
