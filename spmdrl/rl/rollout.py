"""One rollout: prompts from the queue, samples from the engine, observations, rewards while the engine goes on."""

import math
from itertools import accumulate, pairwise

import torch

from spmdrl.data.episode import Episode
from spmdrl.health.preempt import AbandonedError, agreed
from spmdrl.health.status import tick
from spmdrl.rewards.base import Grader, Reward, RewardInput
from spmdrl.rewards.load import on_engine
from spmdrl.rl.engine_judges import EngineJudges, is_abandoned
from spmdrl.rl.environment import Environment, SingleTurn
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan, RolloutResult, request_key
from spmdrl.rollout.engine import Completion, Engine, StaleEngineError
from spmdrl.spmd.queue import PromptQueue, Tally
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer


def collect(
    plan: RolloutPlan,
    engine: Engine,
    grader: Grader,
    tokenizer,
    world: World,
    timer: Timer,
    environment: Environment | None = None,
    judges: EngineJudges | None = None,
) -> RolloutResult:
    """Sample and grade what a plan asks for. Collective over the ranks of an engine; engines work on their own.

    environment: None: every episode is a single turn. judges: those on the engine; with them it is collective over all
    who sample.

    Raises:
        StaleEngineError: the engine does not hold `plan.version`.
        RewardError: a grading failed.
        ValueError: the engine reported a logp that is not a number (unless `plan.bad_sample` is `skip`).
    """
    if judges:
        judges.begin(plan)
    grading = Grading(grader, tokenizer, world.engine_tp_rank == 0)
    return Rollout(plan, engine, grading, world, environment or SingleTurn()).run(timer)


def raise_if_abandoned(result: RolloutResult, world: World) -> RolloutResult:
    """The result, if no engine has abandoned its part. Collective over those who sample.

    Raises:
        AbandonedError: on every rank that samples.
    """
    if agreed(result.abandoned, world.rollout_group):
        raise AbandonedError("the rollout was abandoned")
    return result


class Grading:
    """Episodes on their way through the reward function, and the rewards that are back, by (position, sample)."""

    def __init__(self, grader: Grader, tokenizer, leads: bool):
        """leads: False on an engine's other ranks, which grade only as far as the engine does, together with it."""
        self.grader, self.tokenizer = grader, tokenizer
        self.graders = [grader] if leads else on_engine(grader)
        self.rewards: dict[tuple[int, int], Reward] = {}
        self.submitted: set[tuple[int, int]] = set()

    def ended(self, group: PromptGroup, episode: Episode) -> None:
        """Have an episode that ended graded, or with it its whole group, if that has ended and the grader wants it."""
        if not self.grader.wants_groups:
            self.submit(group, episode)
        elif group.done:
            self.submit_all(group)

    def submit_all(self, group: PromptGroup) -> None:
        """Have the responses of a group graded, in the order of their samples."""
        for episode in group.episodes:
            self.submit(group, episode)

    def submit(self, group: PromptGroup, episode: Episode) -> None:
        """Have the last response graded."""
        self.submitted.add((group.position, episode.sample))
        if not self.graders:
            return
        prompt = group.prompt
        # Without its end token, as a reward reads it.
        text = self.tokenizer.decode(episode.response, skip_special_tokens=True)
        item = RewardInput(
            prompt.data_source, text, prompt.ground_truth, prompt.extra, prompt.asked, len(group.episodes)
        )
        # It begins with the prompt's index, which the grader's messages name.
        for grader in self.graders:
            grader.submit((prompt.index, episode.sample, group.position), item)

    def poll(self) -> None:
        """Take what is back."""
        for grader in self.graders:
            self._take(grader.poll())

    def finish(self, groups: list[PromptGroup], plan: RolloutPlan, timer: Timer) -> bool:
        """Wait for all; False where the rollout was abandoned meanwhile. groups: those that are done."""
        # Episodes of a carried group that ended in an earlier step were graded there, and are graded again: cheap, and
        # nothing but their tokens has to be kept. A grader of whole groups has got all of them.
        for group in groups:
            for episode in group.episodes:
                if (group.position, episode.sample) not in self.submitted:
                    self.submit(group, episode)
        with timer("reward"):
            for grader in self.graders:
                self._take(grader.drain(plan.may_end))
        return not any(grader.pending for grader in self.graders)

    def _take(self, graded: list[tuple[object, Reward]]) -> None:
        self.rewards |= {(key[2], key[1]): reward for key, reward in graded if isinstance(key, tuple)}


class Rollout:
    """A plan under way on one engine."""

    def __init__(self, plan: RolloutPlan, engine: Engine, grading: Grading, world: World, environment: Environment):
        self.plan, self.engine, self.grading, self.world, self.environment = plan, engine, grading, world, environment
        self.queue = PromptQueue(world, len(plan.prompts), plan.name, plan.assignment)
        self.tally = Tally(world, plan.name, enough_here(plan, world), plan.assignment)
        self.leads = world.engine_tp_rank == 0
        self.groups: dict[int, PromptGroup] = {}
        self.waiting = list(plan.carried)
        self.running = self.begun = self.polls = 0
        # No engine starts with more than its even share: what is left goes to whoever is done first.
        fair = -(-len(plan.prompts) * plan.requests_per_prompt // world.engine_count)
        self.limit = min(engine.capacity, fair + len(plan.carried) * plan.requests_per_prompt)

    def run(self, timer: Timer) -> RolloutResult:
        """Sample until all is done or enough is there, then wait for the rewards."""
        plan, abandoned = self.plan, False
        with timer("rollout"):
            while self.admit():
                ended = self.advance()
                self.polls += 1
                owed = any(g.born <= plan.must_end and not g.done for g in [*self.groups.values(), *self.waiting])
                abandoned = is_abandoned(plan, self.world, self.polls)
                if abandoned or (self.tally.reached(ended) and not owed):
                    break
            unfinished = [g for g in self.groups.values() if not g.done]
            self.cut_short(unfinished)
        done = sorted((g for g in self.groups.values() if g.done), key=lambda g: g.position)
        if abandoned or not self.grading.finish(done, plan, timer):
            # Of a grading that was abandoned the engine's other ranks hear in `raise_if_abandoned`.
            return RolloutResult([], [], self.begun, True)
        episodes = [e for group in done for e in finished(plan, group, self.grading.rewards)] if self.leads else []
        return RolloutResult(episodes, unfinished + self.waiting, self.begun)

    def admit(self) -> bool:
        """Submit groups while there is room; False where nothing runs any more."""
        room = max(-(-(self.limit - self.running) // self.plan.requests_per_prompt), 0)
        taken, self.waiting = self.waiting[:room], self.waiting[room:]
        # Every rank of the engine asks the queue, also for nothing.
        for place in self.queue.take(room - len(taken)):
            taken.append(self.plan.group(place))
            self.begun = place + 1
        for group in taken:
            self.groups[group.position] = group
            for episode in group.open:
                self.submit(group, episode)
        return self.running > 0

    def submit(self, group: PromptGroup, episode: Episode) -> None:
        """Have the engine go on with an episode."""
        self.engine.submit(self.plan.request(group, episode.sample))
        self.running += 1

    def advance(self) -> int:
        """One step of the engine; how many groups it ended."""
        ended = 0
        tick()
        for completion in self.engine.poll():
            self.running -= 1
            group = self.groups[completion.key[0]]
            episode = group.episodes[completion.key[1]]
            extend(episode, completion, self.plan)
            if self.goes_on(group, episode):
                self.submit(group, episode)
                continue
            ended += group.done
            self.grading.ended(group, episode)
        self.grading.poll()
        return ended

    def goes_on(self, group: PromptGroup, episode: Episode) -> bool:
        """Ask the environment for its answer to a response; False where the episode is over."""
        if episode.finish != "stop":
            return False
        observed = self.environment.reply(group.prompt, episode)
        if observed is None:
            return False
        if self.plan.room(episode) <= len(observed.tokens):
            # No token is left for a response to it.
            episode.finish = "length"
            return False
        episode.finish = ""
        try:
            episode.add_observed(observed.tokens, observed.state)
        except ValueError as error:
            raise ValueError(f"{type(self.environment).__name__}.reply: {error}") from error
        return True

    def cut_short(self, unfinished: list[PromptGroup]) -> None:
        """Stop what still runs and keep its tokens."""
        keys = [request_key(e) for g in unfinished for e in g.open]
        for completion in self.engine.abort(keys):
            extend(self.groups[completion.key[0]].episodes[completion.key[1]], completion, self.plan)


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
    if over:
        episode.finish = completion.finish


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


def enough_here(plan: RolloutPlan, world: World) -> int:
    """Groups that this engine alone has to bring under a fixed assignment; over all engines under the queue."""
    if plan.assignment != "static" or not plan.enough:
        return plan.enough
    engines = world.engine_count
    carried = plan.carried_by or [0] * engines
    drawn = [len(range(engine, len(plan.prompts), engines)) for engine in range(engines)]
    mine = shares(plan.enough, [c + d for c, d in zip(carried, drawn, strict=True)])[world.engine_index]
    # 0 is a tally without an end: an engine that owes nothing stops at its first group.
    return max(1, mine)


def shares(enough: int, groups: list[int]) -> list[int]:
    """Divides `enough` groups among engines in proportion to the groups that each has, never more than those.

    They add up to `enough`, or to all groups where those are fewer.
    """
    total, ends = sum(groups), [0, *accumulate(groups)]
    # Rounded at the ends, which are cumulative, so that nothing is lost in rounding.
    marks = [min(enough, total) * end // max(1, total) for end in ends]
    return [after - before for before, after in pairwise(marks)]
