"""Samples the experience for each step, up to `--rollout.staleness` steps in advance."""

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
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer


@dataclass
class Sampler:
    """Samples a run's experience on ranks with an engine. Methods are collective over the ranks that sample.

    Experience can be sampled up to `staleness` steps in advance: step k then uses the weights from the start of step
    max(k - staleness, first step of the run).
    """

    cfg: Config
    world: World
    timer: Timer
    prompts: PromptSet
    engine: Engine
    grader: Grader
    tokenizer: object
    start_step: int = 0
    """First step since the job was last started. This number keeps rollout names unique across restarts."""
    keep: Callable | None = None
    """Filter from `algos/filters.py`, or None."""
    greedy: bool = False
    """True to also sample a greedy response to every prompt."""
    environment: Environment | None = None
    """Environment of the episodes, or None for single-turn episodes."""
    images: ImageReader | None = None
    """Reads the images of prompts; None if the model reads text only."""
    judges: EngineJudges | None = None
    """Judges that run on the engine, or None. Such judges make every rollout collective over the ranks that sample."""
    step: int = 0
    """The next step to sample (0-based)."""
    draws: int = 0
    """Number of prompts drawn by earlier steps."""
    carried: list[PromptGroup] = field(default_factory=list)
    """Groups of the last sampled step that the next step continues on this rank's engine (`Experience.carried`)."""
    ready: deque[Experience] = field(default_factory=deque)
    """Experience sampled in advance, next step first."""

    def take(self, step: int, version: int) -> Experience:
        """Return this step's experience. If it was not sampled in advance, sample it with weight version `version`.

        Raises:
            AbandonedError: sampling was interrupted. Every rank that samples raises it.
        """
        if not self.ready:
            self._next(version)
        assert self.step - len(self.ready) == step, "steps must be taken in order"
        return self.ready.popleft()

    def look_ahead(self, step: int, version: int) -> None:
        """Sample all later steps that may use the weights of this step under `--rollout.staleness`."""
        while self.step <= step + self.cfg.rollout.staleness and self.step < self.cfg.run.steps:
            self._next(version)

    def _next(self, version: int) -> None:
        # Copy the groups, so that the originals are unchanged if sampling is abandoned.
        done = self.fill_batch(self.step, self.draws, version, [group.copy() for group in self.carried])
        self.step += 1
        self.draws += done.drawn
        self.carried = done.carried
        self.ready.append(done)

    def fill_batch(self, step: int, drawn: int, version: int, carried: list[PromptGroup]) -> Experience:
        """Run rollouts until a step has enough prompts. Without a filter, run exactly one.

        Args:
            step: 0-based step.
            drawn: number of prompts drawn by earlier steps.
            version: weight version of the engines.
            carried: groups of the previous step that this rank's engine continues before it takes new prompts
                (`Experience.carried`).

        Raises:
            AbandonedError: sampling was interrupted. Every rank that samples raises it.
            ValueError: `--filter.max-rounds` rollouts did not fill the step; the message states the acceptance rate.
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
        """Return the plan for a rollout over `prompts` prompts, independent of rank and world size.

        Args:
            step: 0-based step.
            first: number of prompts that the run has already drawn.
            prompts: number of prompts to draw.
            version: weight version.
            before: number of prompts that this step has already drawn.
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
        """Execute a plan: sample and grade. Engines work independently until the end.

        timer: defaults to the run's timer.

        Raises:
            AbandonedError: the rollout was interrupted and `plan.keeps_graded` is False. Every rank that samples raises
                it.
            StaleEngineError: the engine's weights do not have the version `plan.version`.
            RewardError: a grading failed.
            ValueError: the engine returned a logp that is not finite, and `plan.bad_sample` is `stop`.
        """
        timer = timer or self.timer
        if self.judges:
            self.judges.begin(plan)
        grading = Grading(self.grader, self.tokenizer, self.world.engine_tp_rank == 0)
        environment = self.environment or Environment(self.images)
        result = Rollout(plan, self.engine, grading, self.world, environment).run(timer)
        # In this collective, all engines wait for the slowest one.
        with timer("exchange"):
            if not plan.keeps_graded and any_rank(result.abandoned, self.world.rollout_group):
                raise AbandonedError("the rollout was abandoned")
        return result

    def close(self) -> None:
        """Stop the reward and environment processes."""
        self.grader.close()
        if self.environment:
            self.environment.close()


def may_end() -> bool:
    """Return True if a preemption notice leaves no time for further sampling."""
    return preemption.sampling_over
