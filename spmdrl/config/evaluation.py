"""Settings of an evaluation, and the run that they make."""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.learning import FilterConfig
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
    TrackingConfig,
)


@dataclass
class BadSampleConfig:
    """Samples that cannot be graded."""

    bad_sample: Literal["stop", "skip"] = FilterConfig.bad_sample
    """A reward or engine logp that is not a number ends the job naming the sample, or the sample is left out and
    counted."""


@dataclass
class EvaluateConfig:
    """Accuracy and pass@k of a model, by the sections that an evaluation reads."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: BadSampleConfig = field(default_factory=BadSampleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=partial(EvalConfig, prompts=0))
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def as_run(cfg: EvaluateConfig, prompts: int) -> Config:
    """The run that only evaluates: no training prompts, no models but policy and reward model, nothing kept.

    prompts: as `--eval.prompts`.
    """
    folder = f"{cfg.run.dir.rstrip('/')}-eval" if cfg.run.dir else ""
    return Config(
        run=dataclasses.replace(cfg.run, name=f"{cfg.run.name}-eval", dir=folder),
        model=cfg.model,
        parallel=cfg.parallel,
        policy=cfg.policy,
        rollout=cfg.rollout,
        filter=FilterConfig(bad_sample=cfg.filter.bad_sample),
        data=dataclasses.replace(cfg.data, train=cfg.data.eval, limit=0),
        reward=cfg.reward,
        eval=dataclasses.replace(cfg.eval, every=1, prompts=prompts),
        tracking=cfg.tracking,
        reference=ReferenceConfig(enabled="off"),
        checkpoint=CheckpointConfig(at_end=False),
    )


def check_evaluation(cfg: EvaluateConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    if not cfg.data.eval:
        raise ConfigError("--data.eval '': name the prompts to evaluate on")
    check(as_run(cfg, cfg.eval.prompts), world_size)
