"""Settings for an evaluation and its plan, and their conversion to a run that only evaluates.

The shared sections declare which settings an evaluation ignores (`unread_by`); YAML files can still contain them.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config import schema
from spmdrl.config.checks import check
from spmdrl.config.declare import Job, hides, section
from spmdrl.config.fields import ConfigError
from spmdrl.config.learning import FilterConfig
from spmdrl.config.placement import samplers
from spmdrl.config.plan import count, ranks, scorer_lines


@hides(Job.EVALUATE)
class EvaluationRunConfig(schema.RunConfig):
    """General evaluation settings: folder, seed, device and time limits."""


@hides(Job.EVALUATE)
class EvaluationModelConfig(schema.ModelConfig):
    """The model to evaluate."""


@hides(Job.EVALUATE)
class EvaluationRolloutConfig(schema.RolloutConfig):
    """The engine used for sampling."""


@dataclass
class BadSampleConfig:
    """Treatment of samples that cannot be graded."""

    bad_sample: Literal["stop", "skip"] = FilterConfig.bad_sample
    """Response to a reward or an engine logp that is not finite: `stop` ends the job and names the sample, and `skip`
    omits the sample and counts it."""


@hides(Job.EVALUATE)
class EvaluationDataConfig(schema.DataConfig):
    """Source of the prompts, and how they are rendered."""


@hides(Job.EVALUATE)
class EvaluationEvalConfig(schema.EvalConfig):
    """Number of prompts and samples, and sampling parameters."""


@hides(Job.EVALUATE)
class EvaluationTrackingConfig(schema.TrackingConfig):
    """How the results are displayed."""


@dataclass
class EvaluationConfig:
    """Evaluation of a model: accuracy and pass@k."""

    run: EvaluationRunConfig = section(EvaluationRunConfig)
    model: EvaluationModelConfig = section(EvaluationModelConfig)
    parallel: schema.ParallelConfig = section(schema.ParallelConfig)
    policy: schema.PolicyConfig = section(schema.PolicyConfig)
    rollout: EvaluationRolloutConfig = section(EvaluationRolloutConfig)
    filter: BadSampleConfig = section(BadSampleConfig)
    data: EvaluationDataConfig = section(EvaluationDataConfig)
    env: str = schema.Config.env
    """Environment for multi-turn samples, in any form that `--env` accepts for training. Empty: each sample is a single
    response."""
    reward: schema.RewardConfig = section(schema.RewardConfig)
    sandbox: schema.SandboxConfig = section(schema.SandboxConfig)
    eval: EvaluationEvalConfig = section(EvaluationEvalConfig, prompts=0)
    tracking: EvaluationTrackingConfig = section(EvaluationTrackingConfig, trackers=())
    is_evaluated: ClassVar[bool] = True


def as_run(cfg: EvaluationConfig, prompts: int, steps: int = 0) -> schema.Config:
    """Return the settings of a run that only evaluates, with the models that sample and score but no reference or
    checkpoints.

    `data.train` also names the evaluation prompts. prompts: as `--eval.prompts`. steps: number of training steps, which
    is 0 because no model is trained, or 1 for checks that need a step.
    """
    folder = f"{cfg.run.dir.rstrip('/')}-eval" if cfg.run.dir else ""
    names = ("model", "parallel", "policy", "rollout", "env", "reward", "sandbox", "tracking")
    return schema.Config(
        **{name: getattr(cfg, name) for name in names},
        run=dataclasses.replace(cfg.run, name=f"{cfg.run.name}-eval", dir=folder, steps=steps),
        filter=FilterConfig(bad_sample=cfg.filter.bad_sample),
        data=dataclasses.replace(cfg.data, train=cfg.data.eval, limit=0),
        eval=dataclasses.replace(cfg.eval, every=1, prompts=prompts),
        reference=schema.ReferenceConfig(enabled="off"),
        checkpoint=schema.CheckpointConfig(at_end=False),
    )


def check_config(cfg: EvaluationConfig, world_size: int) -> None:
    """Check all settings together. Raises ConfigError with one line per problem."""
    if not cfg.data.eval:
        raise ConfigError("--data.eval '': name the prompts to evaluate on")
    check(as_run(cfg, cfg.eval.prompts, steps=1), world_size)


def evaluation_lines(cfg: schema.Config, world_size: int) -> list[str]:
    """Return the lines of an evaluation's plan, which are printed at startup. cfg: the result of `as_run`."""
    of, longest = cfg.engine_ranks, cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    prompts = count(cfg.eval.prompts, "prompt") if cfg.eval.prompts else "all prompts"
    engines = f"{count(samplers(cfg, world_size) // of, 'engine')} of {count(of, 'rank')}"
    return [
        f"ranks    {ranks(cfg, world_size)}",
        f"eval     {prompts} of {cfg.data.eval}, {count(cfg.eval.samples, 'sample')} of each; {engines}",
        f"tokens   at most {longest:,} a sequence",
        *scorer_lines(cfg),
    ]
