"""Rule of each number among the settings by itself: name -> (test, what a valid value is)."""

import math
import re
from collections.abc import Callable
from typing import Any

from spmdrl.config.fields import flag, get, shown
from spmdrl.config.schema import CheckpointConfig

_Rule = tuple[Callable[[Any], bool], str]
# Written so that NaN fails.
_at_least_0: _Rule = (lambda x: 0 <= x < math.inf, "must be 0 or more")
_at_least_1: _Rule = (lambda x: x >= 1, "must be at least 1")
_positive: _Rule = (lambda x: 0 < x < math.inf, "must be above 0")
_share: _Rule = (lambda x: 0 < x <= 1, "must be above 0 and at most 1")
_finite: _Rule = (math.isfinite, "must be a finite number")


def _maybe(valid: Callable[[Any], bool], message: str) -> _Rule:
    """The same rule for a setting that may be None."""
    return (lambda x: x is None or valid(x)), message


RULES: dict[str, _Rule] = {
    "run.steps": _at_least_1,
    "run.seed": _at_least_0,
    "run.timeout": _positive,
    "run.grace": _positive,
    "run.spike_factor": (lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for off"),
    "parallel.dp_replicate": _at_least_1,
    "parallel.dp_shard": (lambda x: x == -1 or x >= 1, "must be at least 1, or -1 for all ranks the other axes leave"),
    "parallel.rollout_ranks": _at_least_0,
    "parallel.scoring_ranks": _at_least_0,
    "parallel.sp": _at_least_1,
    "parallel.cp": _at_least_1,
    "parallel.tp": _at_least_1,
    "parallel.pp": _at_least_1,
    "parallel.virtual_stages": _at_least_1,
    "parallel.first_stage_layers": _at_least_0,
    "parallel.last_stage_layers": _at_least_0,
    "parallel.ep": _at_least_1,
    "parallel.etp": _at_least_1,
    "optimizer.lr": _at_least_0,
    "optimizer.betas": (lambda x: all(0 <= beta < 1 for beta in x), "must be two numbers from 0 up to, but not, 1"),
    "optimizer.eps": _positive,
    "optimizer.weight_decay": _at_least_0,
    "optimizer.clip_grad_norm": _at_least_0,
    "optimizer.warmup_steps": _at_least_0,
    "optimizer.bad_steps": _at_least_0,
    "optimizer.min_lr_ratio": (lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    "policy.max_tokens_per_microbatch": _at_least_1,
    "policy.moe_aux_loss": _at_least_0,
    "policy.moe_bias_rate": _at_least_0,
    "lora.rank": _at_least_0,
    "lora.alpha": _at_least_1,
    "rollout.tp": _at_least_1,
    "rollout.dp": _at_least_1,
    "rollout.ep": _at_least_1,
    "rollout.prompts_per_step": _at_least_1,
    "rollout.samples_per_prompt": _at_least_1,
    "rollout.max_prompt_tokens": _at_least_1,
    "rollout.max_new_tokens": _at_least_1,
    "rollout.temperature": _positive,
    "rollout.top_p": _share,
    "rollout.max_sequences": _at_least_1,
    "rollout.oversample": (lambda x: 1 <= x < math.inf, "must be at least 1"),
    "rollout.partial_steps": _at_least_0,
    "rollout.staleness": _at_least_0,
    "rollout.kv_cache_gib": _at_least_0,
    "rollout.gpu_memory_utilization": _share,
    "rollout.logp_diff_warn": _maybe(lambda x: 0 <= x < math.inf, "must be 0 or more, or None"),
    "rollout.logp_diff_stop": _at_least_0,
    "rollout.push_bucket_mib": _at_least_1,
    "algo.updates_per_step": _at_least_1,
    "algo.clip_low": (lambda x: x is None or 0 <= x <= 1, "must be from 0 to 1"),
    "algo.clip_high": (lambda x: x is None or 0 <= x < math.inf, "must be 0 or more"),
    "algo.dual_clip": (lambda x: x is None or 1 < x < math.inf, "must be above 1, or None for off"),
    "algo.gamma": _maybe(lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    "algo.lam": _maybe(lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    "algo.critic_lam": _maybe(lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    "algo.length_adaptive": _maybe(*_positive),
    "algo.step_weight": _maybe(*_at_least_0),
    "algo.tau_pos": _maybe(*_positive),
    "algo.tau_neg": _maybe(*_positive),
    "algo.cov_ratio": _maybe(*_share),
    "algo.cov_kl_coef": _maybe(*_at_least_0),
    "algo.cov_low": _maybe(*_finite),
    "algo.cov_high": _maybe(*_finite),
    "algo.ratio_cap": _maybe(lambda x: 1 <= x < math.inf, "must be at least 1"),
    "algo.beta": _maybe(*_positive),
    "algo.eta": _maybe(*_positive),
    "algo.positive_coef": _at_least_0,
    "algo.kl_coef": _at_least_0,
    "algo.kl_target": _maybe(*_positive),
    "algo.kl_horizon": _positive,
    "algo.entropy_coef": _finite,
    "correction.low": _maybe(*_at_least_0),
    "correction.high": _maybe(*_positive),
    "correction.reject_low": _maybe(*_at_least_0),
    "correction.reject_high": _maybe(*_positive),
    "shaping.reward_coef": _finite,
    "shaping.clip_low": _maybe(*_finite),
    "shaping.clip_high": _maybe(*_finite),
    "shaping.overlong_buffer": _at_least_0,
    "shaping.overlong_factor": _at_least_0,
    "shaping.length_coef": _finite,
    "filter.low": _finite,
    "filter.high": _finite,
    "filter.max_rounds": _at_least_1,
    "filter.replay_steps": _at_least_0,
    "critic.lr": _at_least_0,
    "critic.clip": _maybe(*_positive),
    "critic.warmup_steps": _at_least_0,
    "process_reward.lr": _at_least_0,
    "process_reward.beta": _positive,
    "process_reward.process_coef": _finite,
    "process_reward.outcome_coef": _finite,
    "safety.limit": _finite,
    "safety.multiplier": _positive,
    "safety.lr": _positive,
    "safety.most": _positive,
    "reference.refresh_every": _at_least_0,
    "reward.model_coef": _finite,
    "data.limit": _at_least_0,
    "reward.workers": _at_least_1,
    "reward.timeout": _positive,
    "reward.max_ungraded": (lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
    "sandbox.seconds": _positive,
    "sandbox.total_seconds": _positive,
    "sandbox.memory_mib": (lambda x: x >= 64, "must be at least 64"),
    "eval.every": _at_least_0,
    "eval.prompts": _at_least_0,
    "eval.samples": _at_least_1,
    "eval.temperature": _at_least_0,
    "eval.top_p": _share,
    "checkpoint.every": _at_least_0,
    "checkpoint.keep": _at_least_1,
    "checkpoint.keep_every": _at_least_0,
    "checkpoint.best": (
        lambda x: bool(re.fullmatch(r"(-?[A-Za-z][\w./@-]*)?", x)),
        "must be the name of a metric, or -name",
    ),
    "tracking.samples": _at_least_0,
}


def rule_problems(config: Any, rules: dict[str, _Rule]) -> list[str]:
    """One line for each setting that its rule does not allow."""
    return [
        f"{flag(name)} {shown(get(config, name))}: {message}"
        for name, (valid, message) in rules.items()
        if not valid(get(config, name))
    ]


def never_measured(checkpoint: CheckpointConfig, every: int, steps: int) -> list[str]:
    """Return a line where no evaluation before the end of a run measures weights that `--checkpoint.best` may keep.

    every: as `--eval.every`. steps: of the run; 0: not known yet.
    """
    both = math.lcm(checkpoint.every, every)
    if "eval/" not in checkpoint.best or not steps or not both or both < steps or checkpoint.every >= steps:
        return []
    return [
        f"--checkpoint.best {checkpoint.best}: --checkpoint.every {checkpoint.every} and --eval.every {every} never "
        f"save and measure the same weights before the last of {steps} steps; take a multiple of --eval.every for "
        "--checkpoint.every"
    ]
