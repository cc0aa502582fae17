"""One rollout: prompts from the queue, samples from the engine, observations, rewards while the engine goes on."""

import math
import time

import torch

from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.engines.engine import Completion, Engine, StaleEngineError
from spmdrl.health.status import tick
from spmdrl.rewards.base import Reward
from spmdrl.rl.engine_judges import is_abandoned
from spmdrl.rl.environment import Environment, Observation, Place
from spmdrl.rl.grading import Grading
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan, RolloutResult, enough_here, request_key
from spmdrl.spmd.queue import PromptQueue, Tally
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer

PATIENCE = 0.2
"""Seconds that a rank waits at a time for environments, where its engine has nothing to do."""


class Rollout:
    """A plan under way on one engine."""

    def __init__(self, plan: RolloutPlan, engine: Engine, grading: Grading, world: World, environment: Environment):
        self.plan, self.engine, self.grading, self.world, self.environment = plan, engine, grading, world, environment
        plan.turn_tokens = environment.turn_tokens
        self.queue = PromptQueue(world, len(plan.prompts), plan.name, plan.assignment)
        self.tally = Tally(world, plan.name, enough_here(plan, world), plan.assignment)
        self.leads = world.engine_tp_rank == 0
        self.groups: dict[int, PromptGroup] = {}
        self.waiting = list(plan.carried)
        self.running = self.begun = self.polls = 0
        self.abandoned = False
        self.asked = self.opening = 0
        """Observations that the environment owes, and those of them with which an episode begins."""
        self.heard: list[tuple[Place, Observation]] = []
        """Observations that came, but have no part in the rollout before the others that are owed have come too."""
        self.ended = 0
        """Groups that ended since the tally was told, but for those that failed."""
        self.idle = 0.0
        """Seconds in which the engine had nothing to do, for the environments'."""
        # No engine starts with more than its even share: what is left goes to whoever is done first.
        self.fair = -(-len(plan.prompts) * plan.requests_per_prompt // world.engine_count)
        self.fair += len(plan.carried) * plan.requests_per_prompt
        # An environment that takes its time to open is opened before the engine has a place for the episode.
        self.places = engine.capacity * (2 if environment.opens_later else 1)

    def run(self, timer: Timer) -> RolloutResult:
        """Sample until all is done or enough is there, then wait for the rewards."""
        plan = self.plan
        with timer("rollout"):
            while self.admit():
                self.advance()
                owed = any(g.born <= plan.must_end and not g.done for g in [*self.groups.values(), *self.waiting])
                ended, self.ended = self.ended, 0
                if self.leaves() or (self.tally.reached(ended) and not owed):
                    break
            self.cut_short(plan.keeps_cut and not self.abandoned)
        unfinished = [g for g in self.groups.values() if not g.done]
        done = sorted((g for g in self.groups.values() if g.done), key=lambda g: g.position)
        if (self.abandoned and not plan.keeps_graded) or not self.grading.finish(done, plan, timer):
            # Of a grading that was abandoned the engine's other ranks hear in `Sampler.rollout`.
            self.abandoned = True
        if self.abandoned:
            done = [group for group in done if plan.keeps_graded and self.grading.has(group)]
        episodes = [e for group in done for e in finished(plan, group, self.grading.rewards)] if self.leads else []
        counts = self.environment.take_counts()
        if counts:
            counts["idle"] = self.idle
        cut = [] if self.abandoned else unfinished + self.waiting
        return RolloutResult(episodes, cut, self.begun, self.abandoned, counts)

    def leaves(self) -> bool:
        """Tell whether the rollout is to be left as it is. Collective over the ranks of an engine."""
        self.polls += 1
        self.abandoned = self.abandoned or is_abandoned(self.plan, self.world, self.polls)
        return self.abandoned

    def admit(self) -> bool:
        """Begin groups while there is room; False where nothing is under way and nothing is left to begin."""
        taken = self.take()
        while taken:
            for group in taken:
                self.groups[group.position] = group
                for episode in group.open:
                    self.begin(group, episode)
            self.observe()
            self.catch_up()
            # All that just began may have failed at once.
            taken = [] if self.running + self.asked else self.take()
        return self.running + self.asked > 0

    def take(self) -> list[PromptGroup]:
        """Return the groups that there is room for, those of earlier steps first."""
        # An episode that waits for an answer of its environment leaves its place in the engine to others.
        under_way, each = self.running + self.asked, self.plan.requests_per_prompt
        free = min(self.places - self.running - self.opening, self.fair - under_way)
        room = max(-(-free // each), 0)
        if self.environment.most_open:
            room = min(room, max((self.environment.most_open - under_way) // each, not under_way))
        taken, self.waiting = self.waiting[:room], self.waiting[room:]
        # Every rank of the engine asks the queue, also for nothing.
        for place in self.queue.take(room - len(taken)):
            taken.append(self.plan.group(place))
            self.begun = place + 1
        return taken

    def begin(self, group: PromptGroup, episode: Episode) -> None:
        """Begin an episode, or go on with one that was cut short."""
        self.environment.open(self.plan, group, episode)
        if not episode.segments:
            self.asked += 1
            self.opening += 1
        elif episode.unanswered:
            self.ask(group, episode, episode.unanswered)
        else:
            self.submit(group, episode)

    def ask(self, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Have the environment answer an episode's last response. finish: as the engine ended it."""
        episode.unanswered = finish
        self.environment.answer(self.plan, group, episode, finish)
        self.asked += 1

    def submit(self, group: PromptGroup, episode: Episode) -> None:
        """Have the engine go on with an episode."""
        self.engine.submit(self.plan.request(group, episode.sample))
        self.running += 1

    def advance(self) -> None:
        """One step of the engine, and what environments said meanwhile."""
        tick()
        if self.running:
            for completion in self.engine.poll():
                self.running -= 1
                group = self.groups[completion.key[0]]
                episode = group.episodes[completion.key[1]]
                extend(episode, completion, self.plan)
                self.ask(group, episode, completion.finish)
            self.observe()
            self.catch_up()
        else:
            began = time.monotonic()
            self.observe(PATIENCE)
            self.idle += time.monotonic() - began
        self.grading.poll()

    def catch_up(self) -> None:
        """Wait for all that environments owe, where the plan asks for that."""
        began = time.monotonic()
        while self.plan.in_order and self.asked and not self.leaves():
            tick()
            self.observe(PATIENCE)
        self.idle += time.monotonic() - began

    def observe(self, wait: float = 0.0) -> None:
        """Take what environments said, waiting up to `wait` seconds.

        Under `plan.in_order` nothing is taken before all that is owed has come, and then it is taken by place: the
        engine rounds a sequence by its neighbours, which must not be those that happened to be answered together.
        """
        self.heard += self.environment.poll(wait)
        if self.plan.in_order and len(self.heard) < self.asked:
            return
        heard, self.heard = sorted(self.heard, key=lambda entry: entry[0]), []
        for (position, sample), seen in heard:
            self.asked -= 1
            group = self.groups[position]
            episode = group.episodes[sample]
            self.opening -= not episode.segments
            try:
                add(seen, episode)
            except ValueError as error:
                raise ValueError(f"{type(self.environment).__name__}: {error}") from error
            if not episode.finish:
                self.submit(group, episode)
                continue
            self.ended += group.done and self.plan.counts(group)
            if seen.failure:
                self.grading.failed(group, episode, seen.failure)
            self.grading.ended(group, episode)

    def cut_short(self, keep: bool) -> None:
        """Stop what still runs and keep its tokens. keep: another step goes on with it."""
        unfinished = [e for g in self.groups.values() for e in g.open]
        keys = [request_key(e) for e in unfinished if e.segments]
        for completion in self.engine.abort(keys):
            extend(self.groups[completion.key[0]].episodes[completion.key[1]], completion, self.plan)
        self.environment.leave(unfinished, keep)


def extend(episode: Episode, completion: Completion, plan: RolloutPlan) -> None:
    """Add what the engine made of an episode's request."""
    if completion.tokens and completion.version != plan.version:
        raise StaleEngineError(f"a sample of weight version {completion.version} came into a rollout of {plan.version}")
    over = completion.finish != "abort"
    if completion.tokens or over:
        episode.add_sampled(completion.tokens, completion.logp, plan.version)
    if completion.experts is not None:
        # An earlier part's tokens ran again, by later weights: what counts is how their logp came about.
        episode.add_experts(completion.experts)


def add(seen: Observation, episode: Episode) -> None:
    """Add an observation to an episode. Raises ValueError where it does not fit."""
    episode.unanswered = ""
    if seen.reward:
        episode.add_reward(seen.reward)
    if seen.over:
        episode.finish, episode.given = seen.over, seen.given
        episode.parts, episode.talk = seen.parts, None
        if not episode.segments:
            # It failed before it began; a batch never sees it.
            episode.segments.append(prompt_segment([]))
    elif not episode.segments:
        episode.segments.append(prompt_segment(seen.tokens))
    elif seen.anew:
        episode.fork(seen.tokens, seen.state)
    else:
        episode.add_observed(seen.tokens, seen.state)


def finished(plan: RolloutPlan, group: PromptGroup, rewards: dict[tuple[int, int], Reward]) -> list[Episode]:
    """The samples of a group, with their rewards; the greedy episode's is the others' baseline.

    Raises:
        ValueError: a logp is not finite, unless such samples are skipped.
    """
    greedy = rewards[group.position, plan.samples] if plan.greedy else Reward(0.0)
    baseline = greedy.score if greedy.applies else math.nan
    first = group.episodes[0].experts
    for episode in group.episodes[: plan.samples]:
        reward = rewards[group.position, episode.sample]
        episode.reward, episode.parts, episode.timed_out = reward.score, reward.parts, reward.timed_out
        episode.ungraded = bool(reward.ungraded) or not reward.applies
        if episode.ungraded:
            episode.reward = math.nan
        episode.baseline = baseline
        if not all(bool(torch.isfinite(s.logp).all()) for s in episode.segments if s.logp is not None):
            if plan.bad_sample == "stop":
                raise ValueError(
                    f"the engine reported a logp that is not finite for prompt {episode.prompt}, sample "
                    f"{episode.sample}, at weight version {plan.version}; look at grad_norm of the steps before, or "
                    "leave such samples out with --filter.bad-sample skip"
                )
            episode.reward = math.nan
        if not math.isfinite(baseline):
            # There is nothing to subtract from any sample of this prompt.
            episode.reward = math.nan
            episode.ungraded = episode.ungraded or bool(greedy.ungraded) or not greedy.applies
        if episode.experts is not None and first is not None and episode.experts is not first:
            # The prompt as the first sample ran it, so that it can be shared.
            known = min(len(group.prompt.tokens), len(first))
            episode.experts = torch.cat([first[:known], episode.experts[known:]])
    return group.episodes[: plan.samples]
