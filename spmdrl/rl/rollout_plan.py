"""Plans of rollouts, the groups of episodes that they sample, and the experience that results from them.

A carried group is one that a rollout cut short or did not begin, and that a later rollout continues.
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
"""Number of polls after which the ranks of an engine decide together, each time, whether to abandon the rollout."""


@dataclass
class PromptGroup:
    """The episodes of one prompt, all of them on one engine."""

    position: int
    """Number of this draw among all draws of prompts in the run. A prompt that is drawn twice has two positions."""
    prompt: Prompt
    born: int
    """Step in which the prompt was drawn; in an evaluation, the constant `evaluation.EVALUATION`."""
    episodes: list[Episode]
    """Episodes in the order of their samples. The greedy episode, if there is one, is the last."""

    @property
    def done(self) -> bool:
        """True if all episodes are finished."""
        return all(e.finish for e in self.episodes)

    @property
    def open(self) -> list[Episode]:
        """Episodes that are not finished."""
        return [e for e in self.episodes if not e.finish]

    def copy(self) -> "PromptGroup":
        """Return a copy that can continue without changing this group. It shares segments, which are never modified."""
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

    In a step's experience the positions of episodes are 0 .. prompts - 1 over all ranks.
    """

    episodes: list[Episode]
    """Episodes of complete groups, on an engine's first rank; empty on its other ranks."""
    drawn: int = 0
    """Number of prompts up to the last one that was begun: by this engine in a rollout, by any engine in a step. The
    next step continues with the prompt after it. 0 on ranks that do not sample."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups to continue later: they were cut short on this rank's engine, or drawn and not begun. Equal on all ranks
    of an engine."""
    bad_samples: int = 0
    """Number of samples left out on this rank. Reasons: a reward or logp is not finite; a sample could not be graded;
    the advantage compares samples, and all other samples of the prompt are left out."""
    stats: Metrics = field(default_factory=Metrics)
    counts: dict[str, float] = field(default_factory=dict)
    """Counts of environments on this rank (`environment.COUNTS`)."""
    abandoned: bool = False
    """True if the rollout was abandoned. Its episodes are then used only under `RolloutPlan.keeps_graded`."""


@dataclass
class RolloutPlan:
    """The prompts to sample, and the settings of sampling. Every rank has the same plan, except for `carried`."""

    name: str
    """Name that is unique in the run; the prompt queue uses it as a key."""
    prompts: list[Prompt]
    """Prompts in the order of their positions."""
    samples: int
    """Number of samples of each prompt."""
    key: tuple[int, ...]
    """Key of the random draws of this rollout: the run's seed, and the step or a constant."""
    version: int
    max_new_tokens: int
    """Maximum number of new tokens of all turns of an episode, including observations."""
    temperature: float
    top_p: float = 1.0
    assignment: str = "queue"
    first_position: int = 0
    """Position of the first prompt; the positions of the other prompts follow it."""
    greedy: bool = False
    """True to sample an additional greedy response to every prompt, whose reward is the baseline of the others."""
    bad_sample: str = "stop"
    """Treatment of a sample with a logp or reward that is not finite: an error (`stop`), or the reward nan (`skip`)."""
    enough: int = 0
    """When this many groups are completed over all engines, the other groups are cut short. 0: complete all groups."""
    least: int = 1
    """A group counts towards `enough` if the environments of at least this many of its samples did not fail."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups of earlier steps that this rank's engine continues, before new prompts."""
    carried_by: list[int] = field(default_factory=list)
    """Number of carried groups of each engine; empty: no engine has any."""
    turn_tokens: int = 0
    """Maximum number of tokens of one response; 0: only the limit on the complete episode applies."""
    in_order: bool = False
    """True if the engine waits for all pending observations before each step and gets requests sorted by (position,
    sample). Timing then affects neither the engine's batches nor the choice of episodes to cut short."""
    keeps_cut: bool = False
    """True if another step continues groups that are cut short."""
    must_end: int = -1
    """Groups whose prompts were drawn in this step or earlier are completed regardless of `enough`. -1: no step."""
    may_end: Callable[[], bool] | None = None
    """Function that is called between steps of the engine and of the grading; if it returns True, the rollout is
    abandoned."""
    keeps_graded: bool = False
    """True if an abandoned rollout still returns the groups that were graded before it was abandoned."""

    @property
    def requests_per_prompt(self) -> int:
        """Number of requests for one prompt: its samples, and the greedy response if there is one."""
        return self.samples + self.greedy

    def group(self, place: int) -> PromptGroup:
        """Return a new group of the prompt at index `place` in `prompts`; its episodes have not begun."""
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
        """Return the request for the next tokens of a sample. Its seed depends only on data, not on the engine."""
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
        """Return True if the rollout is abandoned, equal on all ranks of an engine. Collective over the engine.

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
        """Return this engine's groups among the first `last` prompts that it did not begin.

        Such groups exist only under static assignment, if another engine was faster; no other engine may begin them.
        With a queue the list is empty.
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
    """Return the key of the request for an episode's next tokens, unique within a rollout."""
    return episode.position, episode.sample, episode.turns - 1


def shares(enough: int, groups: list[int]) -> list[int]:
    """Divide `enough` groups among engines in proportion to the number of groups that each engine has.

    The shares add up to `enough`, or to all groups if there are fewer. No share exceeds the engine's number of groups.
    """
    total, ends = sum(groups), [0, *accumulate(groups)]
    # Cumulative sums are rounded instead of shares, so that the shares add up exactly.
    marks = [min(enough, total) * end // max(1, total) for end in ends]
    return [after - before for before, after in pairwise(marks)]
