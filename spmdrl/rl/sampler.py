"""Samples the experience of a step: rollouts are planned, sampled and graded until the step has enough."""

from collections.abc import Callable
from dataclasses import dataclass

from spmdrl.config.schema import Config
from spmdrl.data.order import drawn_indices
from spmdrl.data.prompts import PromptSet
from spmdrl.health.preempt import preemption
from spmdrl.rewards.base import Grader
from spmdrl.rl.engine_judges import EngineJudges
from spmdrl.rl.environment import Environment
from spmdrl.rl.quota import Experience, Quota
from spmdrl.rl.rollout import collect, raise_if_abandoned
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan, RolloutResult
from spmdrl.rollout.engine import Engine
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer


@dataclass
class Sampler:
    """Samples the steps of a run, on a rank that has an engine. Methods are collective over the ranks that sample."""

    cfg: Config
    world: World
    timer: Timer
    prompts: PromptSet
    engine: Engine
    grader: Grader
    tokenizer: object
    start_step: int = 0
    """Step at which the job took up the run, so that no two starts use one name for a rollout."""
    keep: Callable | None = None
    """Filter of `algos/filters.py`."""
    greedy: bool = False
    """True to sample a greedy response to every prompt too."""
    environment: Environment | None = None
    judges: EngineJudges | None = None
    """Judges on the engine; None: there are none."""

    def plan(self, step: int, first: int, prompts: int, version: int, before: int = 0) -> RolloutPlan:
        """A rollout of `prompts` prompts, the same on every rank and for every world size.

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

    def rollout(self, plan: RolloutPlan) -> RolloutResult:
        """Samples and grades the plan.

        Raises:
            AbandonedError: on every rank that samples.
        """
        asked = self.engine, self.grader, self.tokenizer, self.world, self.timer, self.environment, self.judges
        result = collect(plan, *asked)
        # Engines wait for the slowest one here.
        with self.timer("exchange"):
            return raise_if_abandoned(result, self.world)

    def collect_step(self, step: int, drawn: int, version: int, carried: list[PromptGroup]) -> Experience:
        """Samples until a step has its prompts; without a filter, once.

        Args:
            step: counted from 0.
            drawn: prompts that the steps before have drawn.
            version: of the weights that the engines hold.
            carried: groups that the step before cut short on this rank's engine; they come first.

        Raises:
            ValueError: `--filter.max-rounds` rollouts did not fill the step; with the acceptance rate.
        """
        quota = Quota(self.cfg, self.world, self.keep, step, carried)
        for _ in range(quota.most_rounds):
            plan = quota.order(self.plan(step, drawn + quota.drawn, quota.next_prompts, version, quota.drawn))
            quota.take(plan, self.rollout(plan))
            if quota.is_full:
                return quota.experience()
        raise quota.shortage()

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self.grader.close()
        if self.environment:
            self.environment.close()


def may_end() -> bool:
    """True if a preemption notice has left no more time for sampling."""
    return preemption.sampling_over
