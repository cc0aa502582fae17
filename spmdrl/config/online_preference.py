"""Settings for online preference learning on the policy's own samples, with their rules."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config.checks import run_problems
from spmdrl.config.declare import FINITE, NOT_NEGATIVE, SHARE, Job, hides, section, setting
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.learning import AlgoConfig
from spmdrl.config.plan import count as counted
from spmdrl.config.plan import plan_lines
from spmdrl.config.preference import (
    PreferenceMethod,
    has_pairs,
    has_reference,
    losses_of,
    method_problems,
    reference_problems,
)
from spmdrl.config.schema import Config, OptimizerConfig, ReferenceConfig, RunConfig


@hides(Job.ONLINE)
@dataclass
class OnlineReferenceConfig(ReferenceConfig):
    """The frozen reference model."""

    path: str = setting("", only_with=lambda c: c.has_reference)
    """The reference model, in any form that `--model.path` accepts. Empty: the starting model."""
    mix: float = setting(1.0, SHARE, only_with=lambda c: c.has_reference and c.reference.refresh_every)
    """Weight m of the policy in each update of the reference (`refresh_every`): the new reference is
    m x policy + (1 - m) x reference. With m = 1 it is a copy of the policy."""


@hides(Job.ONLINE)
@dataclass
class OnlineMethod(PreferenceMethod):
    """The loss, and which samples it compares: the best and the worst of each prompt."""

    method: Literal["dpo", "ipo", "simpo", "cpo", "orpo", "rpo", "mpo", "apo", "sppo", "raft"] = "dpo"
    """Published method, which selects the losses; `--preference.loss` replaces them."""
    gap: float = setting(0.0, NOT_NEGATIVE)
    """Skip prompts unless the rewards of their best and worst samples differ by more than this value."""
    least_reward: float | None = setting(None, FINITE)
    """Skip prompts unless their best sample has at least this reward. None: no bound."""


@hides(Job.ONLINE)
@dataclass
class OnlinePreferenceConfig(Config):
    """Preference learning on the policy's own samples. Every rank runs this same program."""

    run: RunConfig = section(RunConfig, name="online")
    optimizer: OptimizerConfig = section(OptimizerConfig, lr=1e-6)
    reference: OnlineReferenceConfig = section(OnlineReferenceConfig)
    preference: OnlineMethod = section(OnlineMethod)
    # No advantage is computed. The checks accept `reinforce` for any group size.
    algo: AlgoConfig = section(AlgoConfig, advantage="reinforce")
    has_advantages: ClassVar[bool] = False

    @property
    def has_reference(self) -> bool:
        """True if any loss uses the reference."""
        return has_reference(self.preference)


def takes_best_alone(config: OnlinePreferenceConfig) -> bool:
    """Return True if the policy is trained only on the best sample of each prompt (RAFT, best-of-n)."""
    return losses_of(config.preference).keys() == {"sft"}


def check_online_preference(config: OnlinePreferenceConfig, world_size: int, here: bool = True) -> None:
    """Check all settings together. here: as in `run_problems`. Raises ConfigError with one line per problem."""
    try:
        losses = losses_of(config.preference)
    except ValueError as error:
        refuse([str(error)])
    problems = method_problems(config.preference, losses)
    refuse(problems + _problems(config, losses) + run_problems(config, world_size, here))


def _problems(config: OnlinePreferenceConfig, losses: dict[str, float]) -> list[str]:
    rollout, problems = config.rollout, Problems(config, reference_problems(config))
    if not has_pairs(config.preference):
        problems.append(
            f"--preference.loss {' '.join(losses)}: needs labelled responses; take a loss that compares pairs"
        )
    alone = losses.keys() == {"sft"}
    if alone and config.preference.gap:
        problems.append(
            "--preference.gap: only the best sample of a prompt is trained on; take --preference.least-reward"
        )
    if rollout.samples_per_prompt < 2 and not alone:
        problems.add("rollout.samples_per_prompt", "must be at least 2, for a pair")
    shared = config.policy.share_prompts and config.policy.backend == "fsdp"
    longest = rollout.max_prompt_tokens * (1 if shared else 2) + 2 * rollout.max_new_tokens
    if longest > config.policy.max_tokens_per_microbatch and not alone:
        problems.add("policy.max_tokens_per_microbatch", f"must hold a pair, so at least {longest}")
    return problems


def online_lines(config: OnlinePreferenceConfig, world_size: int) -> list[str]:
    """Return the lines of the job's plan, which are printed at startup and by `--dry-run`."""
    losses, count = losses_of(config.preference), config.rollout.samples_per_prompt
    alone, prompts = takes_best_alone(config), config.rollout.prompts_per_step
    weighted = ", ".join(f"{name} x {weight:g}" for name, weight in losses.items())
    what = "the best" if alone else "the best and the worst"
    moves = config.reference.refresh_every
    lines = [line for line in plan_lines(config, world_size) if not line.startswith("update")]
    return [
        *lines,
        f"update   1 optimizer step a step, on at most {counted(prompts * (1 if alone else 2), 'sequence')}: {what} of "
        f"{counted(count, 'sample')} of each prompt; loss {weighted}",
        *([f"reference moves every {counted(moves, 'step')}"] if moves else []),
    ]
