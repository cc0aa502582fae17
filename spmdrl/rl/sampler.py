"""Samples the experience of a step, some steps ahead if that is allowed: plan, rollout, grade, fill the batch."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.schema import Config
from spmdrl.data.mixture import drawn_indices
from spmdrl.data.prompts import PromptSet
from spmdrl.engines.engine import Engine
from spmdrl.health.preempt import AbandonedError, any_rank, preemption
from spmdrl.rewards.base import Grader
from spmdrl.rl.engine_judges import EngineJudges
from spmdrl.rl.environment import Environment
from spmdrl.rl.fill_batch import Filling
from spmdrl.rl.grade import Grading
from spmdrl.rl.rollout import Rollout
from spmdrl.rl.rollout_plan import Experience, PromptGroup, RolloutPlan
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer


@dataclass
class Sampler:
    """Samples the steps of a run, on a rank that has an engine. Methods are collective over the ranks that sample.

    It holds groups that were cut short, and experience that was sampled up to `staleness` steps ahead: the experience
    of step k comes from the weights that step max(k - staleness, first) began with.
    """

    cfg: Config
    world: World
    timer: Timer
    prompts: PromptSet
    engine: Engine
    grader: Grader
    tokenizer: object
    start_step: int = 0
    """Step at which this start of the job began, so that no two starts use one name for a rollout."""
    keep: Callable | None = None
    """Filter of `algos/filters.py`."""
    greedy: bool = False
    """True to sample a greedy response to every prompt too."""
    environment: Environment | None = None
    """None: every episode is a single turn."""
    judges: EngineJudges | None = None
    """Judges on the engine, with which every rollout is collective."""
    step: int = 0
    """The next step to sample."""
    draws: int = 0
    """Prompts that earlier steps have drawn."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups that the last step cut short on this rank's engine."""
    ready: deque[Experience] = field(default_factory=deque)
    """Experience that is sampled and not yet consumed, oldest step first."""

    def take(self, step: int, version: int) -> Experience:
        """Return this step's experience, sampled by the weights of `version` unless it is ready.

        Raises:
            AbandonedError: on every rank that samples.
        """
        if not self.ready:
            self._next(version)
        assert self.step - len(self.ready) == step, "one step after the other"
        return self.ready.popleft()

    def look_ahead(self, step: int, version: int) -> None:
        """Sample all experience that may come from the weights of this step."""
        while self.step <= step + self.cfg.rollout.staleness and self.step < self.cfg.run.steps:
            self._next(version)

    def _next(self, version: int) -> None:
        # A copy: sampling that is abandoned leaves them as they were.
        done = self.fill_batch(self.step, self.draws, version, [group.copy() for group in self.carried])
        self.step += 1
        self.draws += done.drawn
        self.carried = done.carried
        self.ready.append(done)

    def fill_batch(self, step: int, drawn: int, version: int, carried: list[PromptGroup]) -> Experience:
        """Sample until a step has its prompts; without a filter, once.

        Args:
            step: counted from 0.
            drawn: prompts that earlier steps have drawn.
            version: of the weights that the engines hold.
            carried: groups that the step before cut short on this rank's engine; they come first.

        Raises:
            AbandonedError: on every rank that samples.
            ValueError: `--filter.max-rounds` rollouts did not fill the step; with the acceptance rate.
        """
        filling = Filling(self.cfg, self.world, self.keep, step, carried)
        for _ in range(filling.most_rounds):
            plan = self.plan(step, drawn + filling.done.drawn, filling.next_prompts, version, filling.done.drawn)
            filling.order(plan)
            filling.take(plan, self.rollout(plan))
            if filling.is_full:
                return filling.experience()
        raise filling.shortage()

    def plan(self, step: int, first: int, prompts: int, version: int, before: int = 0) -> RolloutPlan:
        """Return the plan of a rollout of `prompts` prompts, the same on every rank and for every world size.

        Args:
            step: counted from 0.
            first: prompts that the run has drawn before.
            prompts: how many to draw.
            version: of the weights.
            before: prompts that this step has drawn before.
        """
        cfg = self.cfg.rollout
        drawn = drawn_indices(len(self.prompts), first, prompts, self.cfg.run.seed, self.cfg.data.shuffle)
        return RolloutPlan(
            f"train/{self.start_step}/{step}/{before}",
            [self.prompts.prompts[i] for i in drawn],
            cfg.samples_per_prompt,
            (self.cfg.run.seed, step),
            version,
            cfg.max_new_tokens,
            cfg.temperature,
            cfg.top_p,
            cfg.assignment,
            first_position=first,
            greedy=self.greedy,
            bad_sample=self.cfg.filter.bad_sample,
            in_order=self.cfg.run.deterministic,
            may_end=may_end,
        )

    def rollout(self, plan: RolloutPlan, timer: Timer | None = None) -> Experience:
        """Sample and grade the prompts of a plan; engines work on their own. timer: None: that of the run.

        Raises:
            AbandonedError: on every rank that samples, unless the plan keeps what is graded.
            StaleEngineError: the engine does not hold `plan.version`.
            RewardError: a grading failed.
            ValueError: the engine reported a logp that is not a number (unless `plan.bad_sample` is `skip`).
        """
        timer = timer or self.timer
        if self.judges:
            self.judges.begin(plan)
        grading = Grading(self.grader, self.tokenizer, self.world.engine_tp_rank == 0)
        result = Rollout(plan, self.engine, grading, self.world, self.environment or Environment()).run(timer)
        # Engines wait for the slowest one here.
        with timer("exchange"):
            if not plan.keeps_graded and any_rank(result.abandoned, self.world.rollout_group):
                raise AbandonedError("the rollout was abandoned")
        return result

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self.grader.close()
        if self.environment:
            self.environment.close()


def may_end() -> bool:
    """Return True if a preemption notice leaves no more time for sampling."""
    return preemption.sampling_over
