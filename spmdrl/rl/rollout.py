"""Runs one rollout: takes prompts from the queue, samples, adds observations, and grades finished episodes."""

import time
from collections import Counter

from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.engines.engine import Completion, Engine, StaleEngineError
from spmdrl.health.status import tick
from spmdrl.rl.environment import Environment, Observation, Place, share
from spmdrl.rl.grade import Grading
from spmdrl.rl.rollout_plan import Experience, PromptGroup, RolloutPlan, request_key
from spmdrl.spmd.queue import PromptQueue, Tally
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer

PATIENCE = 0.2
"""Maximum seconds of a single wait for environments while the rank's engine is idle."""


class Rollout:
    """Executes a rollout plan on one engine."""

    def __init__(self, plan: RolloutPlan, engine: Engine, grading: Grading, world: World, environment: Environment):
        self.plan, self.engine, self.grading, self.world, self.environment = plan, engine, grading, world, environment
        plan.turn_tokens = environment.turn_tokens
        self.shares = environment.remote and world.engine_group is not None
        self.queue = PromptQueue(world, len(plan.prompts), plan.name, plan.assignment)
        self.tally = Tally(world, plan.name, plan.enough_here(world), plan.assignment)
        self.leads = world.engine_tp_rank == 0
        self.groups: dict[int, PromptGroup] = {}
        self.waiting = list(plan.carried)
        self.begun = self.polls = 0
        self.abandoned = False
        self.phases: Counter[str] = Counter()
        """Number of episodes in each phase before grading (`Episode.phase`)."""
        self.observations: list[tuple[Place, Observation]] = []
        """Observations that have arrived, but are held back until all pending ones have arrived (`plan.in_order`)."""
        self.ended = 0
        """Number of groups completed since the last call of `tally.reached`, excluding groups that do not count
        (`RolloutPlan.counts`)."""
        self.idle = 0.0
        """Seconds that the engine was idle because the rollout waited for environments."""
        # An engine starts new groups only while it has fewer requests in flight than its equal share of the rollout's
        # requests. Engines that finish early take more prompts.
        self.fair = -(-len(plan.prompts) * plan.requests_per_prompt // world.engine_count)
        self.fair += len(plan.carried) * plan.requests_per_prompt
        # Remote environments may be slow to open, so they are opened before the engine has a free slot for the episode.
        self.places = engine.capacity * (2 if environment.remote else 1)

    @property
    def running(self) -> int:
        """Number of requests in the engine."""
        return self.phases["sampling"]

    @property
    def due(self) -> int:
        """Number of episodes whose next observation has not been processed yet."""
        return self.phases["opening"] + self.phases["answering"]

    def enter(self, episode: Episode, phase: str) -> None:
        """Move an episode to another phase of the rollout."""
        self.phases[episode.phase] -= 1
        self.phases[phase] += 1
        episode.phase = phase

    def run(self, timer: Timer) -> Experience:
        """Sample until all or enough groups are complete or the rollout is abandoned, then wait for rewards."""
        plan = self.plan
        with timer("rollout"):
            while self.admit():
                self.advance()
                awaited = any(g.born <= plan.must_end and not g.done for g in [*self.groups.values(), *self.waiting])
                ended, self.ended = self.ended, 0
                if self.leaves() or (self.tally.reached(ended) and not awaited):
                    break
            self.cut_short(plan.keeps_cut and not self.abandoned)
        unfinished = [g for g in self.groups.values() if not g.done]
        done = sorted((g for g in self.groups.values() if g.done), key=lambda g: g.position)
        if (self.abandoned and not plan.keeps_graded) or not self.grading.finish(done, plan, timer):
            # Other ranks may not know this yet. Unless `plan.keeps_graded`, `Sampler.rollout` raises AbandonedError on
            # every rank that samples.
            self.abandoned = True
        if self.abandoned:
            done = [group for group in done if plan.keeps_graded and self.grading.has(group)]
        episodes = [e for group in done for e in self.grading.graded(group, plan)] if self.leads else []
        out = Experience(episodes, self.begun, [] if self.abandoned else unfinished + self.waiting)
        out.abandoned, out.counts = self.abandoned, self.environment.take_counts()
        if out.counts:
            out.counts["idle"] = self.idle
        return out

    def leaves(self) -> bool:
        """Return True if the rollout is abandoned. Collective over the ranks of an engine."""
        self.polls += 1
        self.abandoned = self.abandoned or self.plan.is_abandoned(self.world, self.polls)
        return self.abandoned

    def admit(self) -> bool:
        """Start groups while there is room. Returns False if no episode is running and no group is left to start."""
        taken = self.take()
        while taken:
            for group in taken:
                self.groups[group.position] = group
                for episode in group.open:
                    self.begin(group, episode)
            self.observe()
            self.catch_up()
            # If all episodes that were just started have already failed, start more groups.
            taken = [] if self.running + self.due else self.take()
        return self.running + self.due > 0

    def take(self) -> list[PromptGroup]:
        """Return as many groups as there is room for, starting with groups carried over from earlier steps."""
        # An episode that waits for its environment does not occupy an engine slot.
        under_way, each = self.running + self.due, self.plan.requests_per_prompt
        free = min(self.places - self.running - self.phases["opening"], self.fair - under_way)
        room = max(-(-free // each), 0)
        if self.environment.most_open:
            room = min(room, max((self.environment.most_open - under_way) // each, not under_way))
        taken, self.waiting = self.waiting[:room], self.waiting[room:]
        # `queue.take` may be collective over the engine. All ranks of the engine compute the same room, so all of them
        # make this call.
        for place in self.queue.take(room - len(taken)):
            taken.append(self.plan.group(place))
            self.begun = place + 1
        return taken

    def begin(self, group: PromptGroup, episode: Episode) -> None:
        """Start an episode, or resume one that was cut short."""
        self.environment.open(self.plan, group, episode)
        if not episode.segments:
            self.enter(episode, "opening")
        elif episode.unanswered:
            self.ask(group, episode, episode.unanswered)
        else:
            self.submit(group, episode)

    def ask(self, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Send an episode's last response to the environment. finish: the engine's finish reason."""
        episode.unanswered = finish
        self.environment.answer(self.plan, group, episode, finish)
        self.enter(episode, "answering")

    def submit(self, group: PromptGroup, episode: Episode) -> None:
        """Submit the request for an episode's next response to the engine."""
        self.engine.submit(self.plan.request(group, episode.sample))
        self.enter(episode, "sampling")

    def advance(self) -> None:
        """Run an engine step, or wait for environments if the engine is idle; then process what has arrived."""
        tick()
        if self.running:
            for completion in self.engine.poll():
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
        """Wait for all pending observations if the plan is `in_order`."""
        began = time.monotonic()
        while self.plan.in_order and self.due and not self.leaves():
            tick()
            self.observe(PATIENCE)
        self.idle += time.monotonic() - began

    def observe(self, wait: float = 0.0) -> None:
        """Process observations from the environments, waiting up to `wait` seconds for the first.

        With `plan.in_order`, observations are held back until all of them have arrived, and are then processed in order
        of (position, sample). The composition of the engine's batch affects rounding, so it must not depend on the
        timing of answers.
        """
        came = self.environment.poll(wait)
        self.observations += share(came, self.world) if self.shares else came
        if self.plan.in_order and len(self.observations) < self.due:
            return
        observations, self.observations = sorted(self.observations, key=lambda entry: entry[0]), []
        for (position, sample), seen in observations:
            group = self.groups[position]
            episode = group.episodes[sample]
            try:
                add(seen, episode)
            except ValueError as error:
                raise ValueError(f"{type(self.environment).__name__}: {error}") from error
            if not episode.finish:
                self.submit(group, episode)
                continue
            self.enter(episode, "")
            self.ended += group.done and self.plan.counts(group)
            if seen.failure:
                self.grading.failed(group, episode, seen.failure)
            self.grading.ended(group, episode)

    def cut_short(self, keep: bool) -> None:
        """Abort unfinished episodes and keep their tokens. keep: True if a later step resumes the episodes."""
        unfinished = [e for g in self.groups.values() for e in g.open]
        for episode in (e for g in self.groups.values() if not g.done for e in g.episodes):
            # Finished episodes of an unfinished group are graded later, together with the rest of the group.
            self.enter(episode, "")
        keys = [request_key(e) for e in unfinished if e.segments]
        for completion in self.engine.abort(keys):
            extend(self.groups[completion.key[0]].episodes[completion.key[1]], completion, self.plan)
        self.environment.leave(unfinished, keep)


def extend(episode: Episode, completion: Completion, plan: RolloutPlan) -> None:
    """Append the engine's completion to its episode."""
    if completion.tokens and completion.version != plan.version:
        raise StaleEngineError(
            f"the engine sampled with weight version {completion.version} in a rollout of version {plan.version}"
        )
    if completion.tokens or completion.finish != "abort":
        episode.add_sampled(completion.tokens, completion.logp, plan.version)
    if completion.experts is not None:
        # For a resumed episode, the engine prefills the earlier tokens again with newer weights. `add_experts` keeps
        # the routing of the first pass, because that pass produced the tokens' logp.
        episode.add_experts(completion.experts)


def add(seen: Observation, episode: Episode) -> None:
    """Add an observation to an episode. Raises ValueError if the episode cannot continue with it."""
    episode.unanswered = ""
    if seen.reward:
        episode.add_reward(seen.reward)
    if seen.over:
        episode.finish, episode.given = seen.over, seen.given
        episode.parts, episode.conversation = seen.parts, None
        if not episode.segments:
            # The episode failed before it started. It gets an empty prompt and never enters a batch.
            episode.segments.append(prompt_segment([]))
    elif not episode.segments:
        episode.segments.append(prompt_segment(seen.tokens, seen.images))
    elif seen.anew:
        episode.fork(seen.tokens, seen.state, seen.images)
    else:
        episode.add_observed(seen.tokens, seen.state, images=seen.images)
