"""Settings of the learning method, as nested dataclasses: the sections that correspond to `algos/`.

`schema.py` adds them to the other settings of a run. The docstring below a field is its `--help` text. Presets
(`presets.py`) set fields of this module and of `schema.py` by name.
"""

import math
from dataclasses import dataclass
from typing import Literal

from spmdrl.config.composition import advantage_alone, correction, needs
from spmdrl.config.declare import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, SHARE, UNIT, Free, Rule, at_least, setting


@dataclass
class AlgoConfig:
    """The learning method: advantage, loss, KL, and the optimizer updates per step."""

    preset: str = "grpo"
    """Published method (docs/algorithms.md) whose values are used for this and other sections; YAML files and flags
    override them."""
    advantage: str = "grpo"
    """Advantage estimator: a name from docs/algorithms.md, or path/to/file.py:function."""
    loss: str = "ppo"
    """Policy loss: a name from docs/algorithms.md, or path/to/file.py:function."""
    aggregation: str = "seq-mean-token-mean"
    """How per-token losses are reduced to a scalar. Empty: as in the paper that introduced the loss."""
    updates_per_step: int = setting(1, COUNT)
    """Number of optimizer updates per step; each update uses an equal share of the step's prompts."""
    gamma: float | None = setting(None, UNIT)
    """Discount factor per token (gae, reinforce_plus_plus, gigpo, prime) or per turn (turn_gae, turn_rloo). None, here
    and for all settings below that do not define it otherwise: the method's default."""
    lam: float | None = setting(None, UNIT)
    """GAE lambda for the policy's advantages, per token (gae) or per turn (turn_gae)."""
    critic_lam: float | None = setting(None, UNIT)
    """GAE lambda for the critic's return targets. None: the same as for the advantages."""
    length_adaptive: float | None = setting(None, POSITIVE)
    """VAPO's alpha, which makes lambda depend on the response length: lambda = 1 - 1 / (alpha * sampled tokens). None:
    off."""
    step_weight: float | None = setting(None, NOT_NEGATIVE)
    """Weight of the turn-level advantage that gigpo adds to the episode-level advantage."""
    part_weights: tuple[str, ...] = ()
    """Reward parts that GDPO normalises separately, as `name=weight`; the part `score` is the complete reward. Empty:
    the score and all parts, each with weight 1. If the score is the sum of the parts, list only the parts."""
    clip_low: float | None = setting(None, UNIT)
    """Lower clip bound: ratios below 1 - clip_low are clipped, unless the loss defines it differently."""
    clip_high: float | None = setting(None, NOT_NEGATIVE)
    """Upper clip bound: ratios above 1 + clip_high are clipped, unless the loss defines it differently."""
    dual_clip: float | None = setting(None, Rule(lambda x: 1 < x < math.inf, "must be above 1, or None for off"))
    """Dual-clip bound: for a negative advantage A, the ppo loss is at most -A * dual_clip. None: off."""
    tau_pos: float | None = setting(None, POSITIVE)
    """Temperature of SAPO's gate for tokens with positive advantage."""
    tau_neg: float | None = setting(None, POSITIVE)
    """Temperature of SAPO's gate for tokens with negative or zero advantage."""
    cov_ratio: float | None = setting(None, SHARE)
    """Fraction of all tokens that the losses kl_cov and clip_cov select."""
    cov_kl_coef: float | None = setting(None, NOT_NEGATIVE)
    """Weight of the kl_cov penalty on the selected tokens."""
    cov_low: float | None = setting(None, FINITE)
    """Lower covariance bound for clip_cov, which selects only tokens above it."""
    cov_high: float | None = setting(None, FINITE)
    """Upper covariance bound for clip_cov, which selects only tokens below it."""
    ratio_cap: float | None = setting(None, at_least(1))
    """Maximum importance ratio in the losses dppo_tv and dppo_kl."""
    beta: float | None = setting(None, POSITIVE)
    """Weight of the quadratic penalty in the dro loss."""
    eta: float | None = setting(None, POSITIVE)
    """Step size eta of the sppo loss."""
    positive_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of an additional loss, the negative log-likelihood of responses with a reward above 0 (VAPO). 0: off."""
    kl_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the KL divergence from the reference. 0: off."""
    kl_in: Literal["loss", "reward"] = setting("loss", only_with=lambda c: c.has_reference)
    """How the KL to the reference is applied: it is added to the loss (`loss`) or subtracted from the reward
    (`reward`)."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = setting("k3", only_with=lambda c: c.has_reference)
    """Estimator of the KL from sampled tokens. With a trailing +, the gradient is that of k2 (straight-through)."""
    kl_target: float | None = setting(None, POSITIVE)
    """Target KL per token in nats, such as 0.1: an adaptive controller adjusts `kl_coef` to keep the KL near it. None:
    `kl_coef` is constant."""
    kl_horizon: float = setting(10000.0, POSITIVE, only_with=lambda c: c.algo.kl_target is not None and c.has_reference)
    """Horizon of the KL controller in samples; larger values make `kl_coef` change more slowly."""
    entropy_coef: float = setting(0.0, FINITE)
    """Weight of the entropy bonus in the loss. 0: off."""
    old_logp: Literal["auto", "policy", "rollout"] = "auto"
    """How old_logp is obtained. `policy`: from a separate forward pass of the policy before the updates. `rollout`:
    from the engine (bypass). `auto`: `rollout` with `--filter.replay-steps`; otherwise the forward pass of the update
    itself, at no cost, if a step makes one update and nothing reads old_logp before it; otherwise `policy`."""
    skip_zero_advantage: bool = setting(False, only_with=advantage_alone)
    """Leave sequences whose advantage is exactly zero out of the forward pass, because their gradient is zero.
    Token-level metrics (clip_fraction, ...) then exclude these sequences. Refused if the loss has terms that are not
    multiplied by the advantage."""


@dataclass
class CorrectionConfig:
    """Importance weights that correct the mismatch between engine and trainer (rollout_logp against old_logp)."""

    kind: Literal["auto", "none", "tis_token", "tis_sequence", "icepop", "mis_token", "mis_sequence"] = "auto"
    """Truncated (tis) or masked (mis, icepop) importance sampling, per token or per sequence. `auto`: tis_token if
    samples can come from weights other than the trainer's (rollout.staleness, rollout.partial_steps,
    rollout.quantization) and old_logp does not come from the engine, otherwise none."""
    low: float | None = setting(None, NOT_NEGATIVE, only_with=lambda c: correction(c) != "none")
    """Lower bound for ratios; smaller ones are masked (icepop, mis). None: the default of `kind`."""
    high: float | None = setting(None, POSITIVE, only_with=lambda c: correction(c) != "none")
    """Upper bound for ratios; larger ones are truncated (tis) or masked (icepop, mis). None: the default of `kind`."""
    reject_low: float | None = setting(None, NOT_NEGATIVE)
    """Mask sequences whose geometric-mean token ratio is below this value. None: off."""
    reject_high: float | None = setting(None, POSITIVE)
    """Mask sequences whose geometric-mean token ratio is above this value. None: off."""


@dataclass
class ShapingConfig:
    """Changes to the rewards before advantages are computed."""

    reward_coef: float = setting(1.0, FINITE)
    """Factor on the reward. At 0 the policy does not learn from rewards, as in distillation."""
    clip_low: float | None = setting(None, FINITE)
    """Rewards below this value are raised to it. None: no bound."""
    clip_high: float | None = setting(None, FINITE)
    """Rewards above this value are lowered to it. None: no bound."""
    normalize: Literal["none", "batch", "running"] = "none"
    """Normalise rewards to mean 0 and standard deviation 1, over the step (`batch`) or over the run so far
    (`running`)."""
    overlong_buffer: int = setting(0, NOT_NEGATIVE)
    """Number of tokens before max_new_tokens at which DAPO's soft overlong penalty starts. 0: no penalty."""
    overlong_factor: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.shaping.overlong_buffer)
    """Size of DAPO's overlong penalty for a response of max_new_tokens tokens."""
    mask_cut: bool = setting(False, only_with=lambda c: c.has_advantages)
    """Mask responses truncated at max_new_tokens in the loss (DAPO's overlong filtering)."""
    length_penalty: Literal["none", "linear", "group"] = "none"
    """Penalty for long responses. `linear`: grows with the length, up to length_coef at max_new_tokens. `group`:
    depends on where the length lies between the shortest and the longest response in the group (Kimi k1.5)."""
    length_coef: float = setting(1.0, FINITE, only_with=lambda c: c.shaping.length_penalty != "none")
    """Weight of the length penalty."""


@dataclass
class FilterConfig:
    """Which samples the policy learns from."""

    keep: str = ""
    """Groups to keep: `mixed` (the rewards in the group differ), `accuracy_range` (the group's mean reward is between
    `low` and `high`), or those selected by path/to/file.py:function. More prompts are sampled until prompts_per_step
    groups are kept. Empty: keep all groups."""
    metric: str = setting("", only_with=lambda c: c.filter.keep)
    """Reward part that `keep` uses; it counts as 0 if grading timed out. Empty: the complete reward."""
    low: float = setting(0.2, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Lowest mean group reward that accuracy_range keeps."""
    high: float = setting(0.8, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Highest mean group reward that accuracy_range keeps."""
    max_rounds: int = setting(10, COUNT, free=Free.LIMIT, only_with=lambda c: c.filter.keep)
    """Maximum number of sampling rounds per step, each of prompts_per_step prompts, to find enough groups. If they are
    not enough, the run ends."""
    resample: str = setting("none", only_with=lambda c: c.has_advantages)
    """How PF-PPO draws the training sequences, with replacement, based on their rewards: `pow` (in proportion to
    |reward| to the power 2, or p with `pow=p`), `max_min`, `max_random`, or within each group `best_random`,
    `best_worst`. `none`: no resampling."""
    replay_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_advantages)
    """Number of earlier steps from which sequences are also drawn (off-policy: old_logp comes from the engine)."""
    bad_sample: Literal["stop", "skip"] = setting("stop", free=Free.LIMIT)
    """Response to a reward or an engine logp that is not finite: `stop` ends the job and names the sample, and `skip`
    omits the sample and counts it."""


def resampling(text: str) -> tuple[str, float]:
    """Return the method and the power of `pow` from `--filter.resample`. Raises ValueError if it cannot be parsed."""
    # This is imported late because algos/ needs torch, and `--help` must work without torch.
    from spmdrl.algos.resample import METHODS

    method, sign, power = text.partition("=")
    if method not in ("none", *METHODS) or (sign and method != "pow"):
        known = ", ".join(("none", *METHODS))
        raise ValueError(f"--filter.resample {text!r}: choose one of {known}, or pow=p with a power p")
    try:
        value = float(power) if sign else 2.0
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"--filter.resample {text!r}: the power must be 0 or more")
    return method, value


@dataclass
class CriticConfig:
    """The value model for GAE."""

    path: str = setting("", only_with=lambda c: "critic" in needs(c))
    """Model to initialise the critic from, in any form that `--model.path` accepts; a language model gets a
    zero-initialised value head. Empty: the model of `--model.path`."""
    lr: float = setting(5e-4, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """Peak learning rate of the critic; its other optimizer settings are the policy's."""
    clip: float | None = setting(0.2, POSITIVE, only_with=lambda c: "critic" in needs(c))
    """Value clip range (PPO): changes of a value within a step beyond this range are clipped in the loss. None: no
    clipping."""
    warmup_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """Number of initial steps in which the critic is trained and the policy is not (VAPO's value pretraining)."""


@dataclass
class ProcessRewardConfig:
    """PRIME's implicit process reward model, which is trained on outcomes during the run."""

    path: str = setting("", only_with=lambda c: "process" in needs(c))
    """Model to initialise the process reward model and its reference from. Empty: the model of `--model.path`."""
    lr: float = setting(1e-6, NOT_NEGATIVE, only_with=lambda c: "process" in needs(c))
    """Peak learning rate of the process reward model."""
    beta: float = setting(0.05, POSITIVE, only_with=lambda c: "process" in needs(c))
    """Scale of the process rewards: a token's reward is beta * (logp - logp of the process reward model's
    reference)."""
    process_coef: float = setting(1.0, FINITE)
    """Weight of process rewards in the advantage."""
    outcome_coef: float = setting(1.0, FINITE)
    """Weight of the outcome reward (the reward for the response) in the advantage."""


@dataclass
class SafetyConfig:
    """A cost constraint in addition to the reward (Safe-RLHF), weighted by a Lagrange multiplier."""

    cost: str = ""
    """Reward part that is used as the cost. If both this and `cost_model` are empty, there is no constraint."""
    cost_model: str = ""
    """HF sequence classifier with one label whose score is used as the cost."""
    limit: float = setting(0.0, FINITE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Maximum allowed mean cost."""
    multiplier: float = setting(1.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Initial value of the Lagrange multiplier."""
    lr: float = setting(0.1, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Step size for the multiplier: each step changes its logarithm by lr * multiplier * (mean cost - limit)."""
    most: float = setting(10.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Maximum value of the multiplier."""
