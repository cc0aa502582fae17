"""Settings of an evaluation, its plan, and the run that they make.

A setting of a shared section that an evaluation does not read is suppressed here: files may hold it, flags may not.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tyro.conf import Suppress

from spmdrl.config.checks import check
from spmdrl.config.environment import check_reward_is_chosen
from spmdrl.config.fields import ConfigError
from spmdrl.config.learning import FilterConfig
from spmdrl.config.load import Loaded
from spmdrl.config.placement import engine_ranks, samplers
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


@dataclass
class EvaluationRunConfig(RunConfig):
    """The evaluation as a whole."""

    steps: Suppress[int] = RunConfig.steps
    fresh: Suppress[bool] = RunConfig.fresh
    allow_changes: Suppress[bool] = RunConfig.allow_changes
    spike_factor: Suppress[float] = RunConfig.spike_factor


@dataclass
class EvaluationRolloutConfig(RolloutConfig):
    """The engine."""

    prompts_per_step: Suppress[int] = RolloutConfig.prompts_per_step
    samples_per_prompt: Suppress[int] = RolloutConfig.samples_per_prompt
    temperature: Suppress[float] = RolloutConfig.temperature
    top_p: Suppress[float] = RolloutConfig.top_p
    oversample: Suppress[float] = RolloutConfig.oversample
    partial_steps: Suppress[int] = RolloutConfig.partial_steps
    staleness: Suppress[int] = RolloutConfig.staleness
    routing_replay: Suppress[bool] = RolloutConfig.routing_replay
    logp_diff_warn: Suppress[float | None] = RolloutConfig.logp_diff_warn
    logp_diff_stop: Suppress[float] = RolloutConfig.logp_diff_stop


@dataclass
class BadSampleConfig:
    """Samples that cannot be graded."""

    bad_sample: Literal["stop", "skip"] = FilterConfig.bad_sample
    """A reward or engine logp that is not a number ends the job naming the sample, or the sample is left out and
    counted."""


@dataclass
class EvaluationDataConfig(DataConfig):
    """Prompts."""

    train: Suppress[str] = DataConfig.train
    limit: Suppress[int] = DataConfig.limit
    shuffle: Suppress[bool] = DataConfig.shuffle


@dataclass
class EvaluationEvalConfig(EvalConfig):
    """Prompts, and how they are sampled."""

    every: Suppress[int] = EvalConfig.every


@dataclass
class EvaluationTrackingConfig(TrackingConfig):
    """Numbers that are shown."""

    trackers: Suppress[tuple[str, ...]] = ()
    project: Suppress[str] = TrackingConfig.project
    samples: Suppress[int] = TrackingConfig.samples


@dataclass
class EvaluationConfig:
    """Accuracy and pass@k of a model, by the settings that an evaluation reads."""

    run: EvaluationRunConfig = field(default_factory=EvaluationRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: EvaluationRolloutConfig = field(default_factory=EvaluationRolloutConfig)
    filter: BadSampleConfig = field(default_factory=BadSampleConfig)
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    env: str = Config.env
    """The environment of the samples, as in a training."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    eval: EvaluationEvalConfig = field(default_factory=partial(EvaluationEvalConfig, prompts=0))
    tracking: EvaluationTrackingConfig = field(default_factory=EvaluationTrackingConfig)


def as_run(cfg: EvaluationConfig, prompts: int, steps: int = 0) -> Config:
    """The run that only evaluates: no training prompts, no models but policy and reward model, nothing kept.

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
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    if not cfg.data.eval:
        raise ConfigError("--data.eval '': name the prompts to evaluate on")
    check(as_run(cfg, cfg.eval.prompts, steps=1), world_size)


def check_use(loaded: Loaded[EvaluationConfig]) -> list[str]:
    """Refuse an environment without a word about the reward; there is nothing to tell of other settings.

    Raises:
        ConfigError: naming the choices.
    """
    check_reward_is_chosen(as_run(loaded.config, 0), loaded.given)
    return []


def evaluation_lines(cfg: Config, world_size: int) -> list[str]:
    """The plan of an evaluation. cfg: as `as_run` makes it."""
    of, longest = engine_ranks(cfg), cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    prompts = count(cfg.eval.prompts, "prompt") if cfg.eval.prompts else "all prompts"
    engines = f"{count(samplers(cfg, world_size) // of, 'engine')} of {count(of, 'rank')}"
    return [
        f"ranks    {ranks(cfg, world_size)}",
        f"eval     {prompts} of {cfg.data.eval}, {count(cfg.eval.samples, 'sample')} of each; {engines}",
        f"tokens   at most {longest:,} a sequence",
        *scorer_lines(cfg),
    ]
