"""Settings of an evaluation, its plan, and the run that evaluates.

Shared sections declare the settings that an evaluation does not read (`unread_by`); files may hold them.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config.checks import check
from spmdrl.config.declare import Job, hides, section
from spmdrl.config.fields import ConfigError
from spmdrl.config.learning import FilterConfig
from spmdrl.config.placement import samplers
from spmdrl.config.plan import count, ranks, scorer_lines
from spmdrl.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    TrackingConfig,
)


@hides(Job.EVALUATE)
class EvaluationRunConfig(RunConfig):
    """The evaluation as a whole."""


@hides(Job.EVALUATE)
class EvaluationRolloutConfig(RolloutConfig):
    """The engine."""


@dataclass
class BadSampleConfig:
    """Samples that cannot be graded."""

    bad_sample: Literal["stop", "skip"] = FilterConfig.bad_sample
    """A reward or engine logp that is not a number ends the job naming the sample, or the sample is left out and
    counted."""


@hides(Job.EVALUATE)
class EvaluationDataConfig(DataConfig):
    """Prompts."""


@hides(Job.EVALUATE)
class EvaluationEvalConfig(EvalConfig):
    """Prompts, and how they are sampled."""


@hides(Job.EVALUATE)
class EvaluationTrackingConfig(TrackingConfig):
    """Numbers that are shown."""


@dataclass
class EvaluationConfig:
    """Accuracy and pass@k of a model, by the settings that an evaluation reads."""

    run: EvaluationRunConfig = section(EvaluationRunConfig)
    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    policy: PolicyConfig = section(PolicyConfig)
    rollout: EvaluationRolloutConfig = section(EvaluationRolloutConfig)
    filter: BadSampleConfig = section(BadSampleConfig)
    data: EvaluationDataConfig = section(EvaluationDataConfig)
    env: str = Config.env
    """The environment of the samples, as in a training."""
    reward: RewardConfig = section(RewardConfig)
    sandbox: SandboxConfig = section(SandboxConfig)
    eval: EvaluationEvalConfig = section(EvaluationEvalConfig, prompts=0)
    tracking: EvaluationTrackingConfig = section(EvaluationTrackingConfig, trackers=())
    is_evaluated: ClassVar[bool] = True


def as_run(cfg: EvaluationConfig, prompts: int, steps: int = 0) -> Config:
    """Return the run that only evaluates, without training prompts, other models and checkpoints.

    prompts: as `--eval.prompts`. steps: 0, so that no model trains.
    """
    folder = f"{cfg.run.dir.rstrip('/')}-eval" if cfg.run.dir else ""
    return Config(
        run=dataclasses.replace(cfg.run, name=f"{cfg.run.name}-eval", dir=folder, steps=steps),
        model=cfg.model,
        parallel=cfg.parallel,
        policy=cfg.policy,
        rollout=cfg.rollout,
        filter=FilterConfig(bad_sample=cfg.filter.bad_sample),
        data=dataclasses.replace(cfg.data, train=cfg.data.eval, limit=0),
        env=cfg.env,
        reward=cfg.reward,
        sandbox=cfg.sandbox,
        eval=dataclasses.replace(cfg.eval, every=1, prompts=prompts),
        tracking=cfg.tracking,
        reference=ReferenceConfig(enabled="off"),
        checkpoint=CheckpointConfig(at_end=False),
    )


def check_config(cfg: EvaluationConfig, world_size: int) -> None:
    """Check all values together. Raises ConfigError with every problem."""
    if not cfg.data.eval:
        raise ConfigError("--data.eval '': name the prompts to evaluate on")
    check(as_run(cfg, cfg.eval.prompts, steps=1), world_size)


def evaluation_lines(cfg: Config, world_size: int) -> list[str]:
    """Return the plan of an evaluation. cfg: the run of `as_run`."""
    of, longest = cfg.engine_ranks, cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    prompts = count(cfg.eval.prompts, "prompt") if cfg.eval.prompts else "all prompts"
    engines = f"{count(samplers(cfg, world_size) // of, 'engine')} of {count(of, 'rank')}"
    return [
        f"ranks    {ranks(cfg, world_size)}",
        f"eval     {prompts} of {cfg.data.eval}, {count(cfg.eval.samples, 'sample')} of each; {engines}",
        f"tokens   at most {longest:,} a sequence",
        *scorer_lines(cfg),
    ]
