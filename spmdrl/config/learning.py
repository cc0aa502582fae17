"""Settings of the learning method, as nested dataclasses: the sections that belong to `algos/`.

`schema.py` puts them together with the rest; the text under a field is its `--help`. Settings that presets fill in
stand here and in `schema.py` under the same names.
"""

import math
from dataclasses import dataclass
from typing import Literal

RESAMPLE = ("none", "pow", "max_min", "max_random", "best_random", "best_worst")
"""Methods of `--filter.resample`."""


@dataclass
class AlgoConfig:
    """The learning method: advantage, loss, KL, optimizer updates of a step."""

    preset: str = "grpo"
    """Published method (docs/algorithms.md): values of this and other sections that YAML and flags override."""
    advantage: str = "grpo"
    """Advantage estimator by name, or path/to/file.py:function."""
    loss: str = "ppo"
    """Policy loss by name, or path/to/file.py:function."""
    aggregation: str = "seq-mean-token-mean"
    """How per-token losses become one number. Empty: as the loss's paper does."""
    updates_per_step: int = 1
    """Optimizer steps on one step's experience; each takes an equal share of its prompts."""
    gamma: float | None = None
    """Discount (gae, reinforce_plus_plus, gigpo, prime, and turn_gae, turn_rloo, by turn). None here and below: the
    method's own value."""
    lam: float | None = None
    """GAE lambda of the policy's advantages (gae by token, turn_gae by turn)."""
    critic_lam: float | None = None
    """GAE lambda of the returns the critic learns; None: the same lambda."""
    length_adaptive: float | None = None
    """VAPO's alpha: lambda = 1 - 1 / (alpha * sampled tokens); None: off."""
    step_weight: float | None = None
    """Weight of GiGPO's step advantage."""
    part_weights: tuple[str, ...] = ()
    """Reward parts that GDPO normalises apart, as `name=weight`; the part `score` is the reward itself. Empty: the
    score and all parts, each with weight 1 (name the parts alone where the score is their sum)."""
    clip_low: float | None = None
    """Clip below: ratio 1 - clip_low, or the loss's own measure."""
    clip_high: float | None = None
    """Clip above: ratio 1 + clip_high, or the loss's own measure."""
    dual_clip: float | None = None
    """Dual-clip bound of ppo for negative advantages; None: off."""
    tau_pos: float | None = None
    """SAPO's temperature for positive advantages."""
    tau_neg: float | None = None
    """SAPO's temperature for all other advantages."""
    cov_ratio: float | None = None
    """Share of all tokens that kl_cov and clip_cov select."""
    cov_kl_coef: float | None = None
    """Weight of kl_cov's penalty on the selected tokens."""
    cov_low: float | None = None
    """clip_cov draws among tokens whose covariance is above this."""
    cov_high: float | None = None
    """clip_cov draws among tokens whose covariance is below this."""
    ratio_cap: float | None = None
    """Largest ratio in dppo_tv and dppo_kl."""
    beta: float | None = None
    """Weight of dro's quadratic penalty."""
    eta: float | None = None
    """SPPO's step size."""
    positive_coef: float = 0.0
    """Weight of the likelihood of responses with a reward above 0 (VAPO)."""
    kl_coef: float = 0.0
    """Weight of KL to the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Term that this KL is part of: the loss, or the reward."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of KL from sampled tokens (a trailing + is the straight-through form)."""
    kl_target: float | None = None
    """KL a token (nats) towards which a controller steers the coefficient, such as 0.1. None: it stays."""
    kl_horizon: float = 10000.0
    """Samples over which the controller moves the coefficient."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_logp: Literal["auto", "policy", "rollout"] = "auto"
    """Source of old_logp: a pass of the policy, or the engine (bypass). `auto`: the update's own first pass where it is
    the same number at no cost (one update a step), else a pass of the policy."""
    skip_zero_advantage: bool = False
    """Leave sequences whose advantage is exactly zero out of the forward, as their gradient is zero; what the update
    tells of tokens (clip_fraction, ...) is then of the others. Refused when something else than the advantage stands
    in the loss."""


@dataclass
class CorrectionConfig:
    """Importance weights for the difference between engine and trainer (rollout_logp against old_logp)."""

    kind: Literal["auto", "none", "tis_token", "tis_sequence", "icepop", "mis_token", "mis_sequence"] = "auto"
    """Truncated (tis) or masked (mis, icepop) importance sampling, by token or by sequence. `auto`: tis_token where
    samples come from other weights (rollout.staleness, rollout.partial_steps, rollout.quantization), else none."""
    low: float | None = None
    """Ratios below count nothing (icepop, mis). None: the method's own."""
    high: float | None = None
    """Ratios above are truncated (tis) or count nothing (icepop, mis). None: the method's own."""
    reject_low: float | None = None
    """Sequences whose geometric mean ratio is below count nothing. None: off."""
    reject_high: float | None = None
    """Sequences whose geometric mean ratio is above count nothing. None: off."""


@dataclass
class ShapingConfig:
    """Changes to rewards before advantages are computed."""

    reward_coef: float = 1.0
    """Factor on the reward; 0 leaves what the reference or teacher says."""
    clip_low: float | None = None
    """Smallest reward; None: no bound."""
    clip_high: float | None = None
    """Largest reward; None: no bound."""
    normalize: Literal["none", "batch", "running"] = "none"
    """Rewards to mean 0 and std 1, over the step or over the run so far."""
    overlong_buffer: int = 0
    """DAPO's soft punishment begins so many tokens before max_new_tokens. 0: off."""
    overlong_factor: float = 1.0
    """Size of that punishment at max_new_tokens."""
    mask_cut: bool = False
    """Leave responses that were cut at max_new_tokens out of the loss (DAPO's overlong filtering)."""
    length_penalty: Literal["none", "linear", "group"] = "none"
    """`linear`: minus length_coef at max_new_tokens. `group`: against the group's shortest and longest (Kimi k1.5)."""
    length_coef: float = 1.0
    """Weight of the length penalty."""


@dataclass
class FilterConfig:
    """Choice of the samples that the policy learns from."""

    keep: str = ""
    """Prompts whose group is kept: `mixed` (its rewards differ), `accuracy_range`, or path/to/file.py:function. Others
    are sampled in their place until prompts_per_step are full. Empty: all."""
    metric: str = ""
    """Reward part that `keep` looks at (0 where the grading timed out). Empty: the reward."""
    low: float = 0.2
    """Lowest group mean that accuracy_range keeps."""
    high: float = 0.8
    """Highest group mean that accuracy_range keeps."""
    max_rounds: int = 10
    """Rounds of prompts_per_step prompts that one step may take to fill up; then the run stops."""
    resample: str = "none"
    """PF-PPO: draw the sequences to learn from by their reward, with replacement: `pow` (|reward| to the power 2, or to
    p by `pow=p`), `max_min`, `max_random`, or within each group `best_random`, `best_worst`."""
    replay_steps: int = 0
    """Draw from so many steps before this one, too (off-policy: old_logp is the engine's)."""
    bad_sample: Literal["stop", "skip"] = "stop"
    """A reward or engine logp that is not a number ends the job naming the sample, or the sample is left out and
    counted."""


def resampling(text: str) -> tuple[str, float]:
    """Return the method of `--filter.resample`, and the power of `pow`.

    Raises:
        ValueError: there is no such method, or the power is no number from 0 on.
    """
    method, sign, power = text.partition("=")
    if method not in RESAMPLE or (sign and method != "pow"):
        raise ValueError(f"--filter.resample {text!r}: choose one of {', '.join(RESAMPLE)}, or pow=p with a power p")
    try:
        value = float(power) if sign else 2.0
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"--filter.resample {text!r}: the power must be 0 or more")
    return method, value


@dataclass
class CriticConfig:
    """The value model of GAE."""

    path: str = ""
    """Model it starts from, as `--model.path` (a language model gets a value head of zeros). Empty: `--model.path`."""
    lr: float = 5e-4
    """Peak learning rate; the rest of its optimizer is the policy's."""
    clip: float | None = 0.2
    """Largest change of a value in one step, as in PPO's value clipping; None: off."""
    warmup_steps: int = 0
    """First steps of the run in which the critic learns and the policy does not (VAPO's value pretraining)."""


@dataclass
class ProcessRewardConfig:
    """The implicit process reward model of PRIME, trained on outcomes as the run goes."""

    path: str = ""
    """Model that it and its reference start from. Empty: `--model.path`."""
    lr: float = 1e-6
    """Peak learning rate."""
    beta: float = 0.05
    """Reward of a token: beta * (logp - logp of its reference)."""
    process_coef: float = 1.0
    """Weight of process rewards in the advantage."""
    outcome_coef: float = 1.0
    """Weight of the outcome in the advantage."""


@dataclass
class SafetyConfig:
    """A constraint on cost beside the reward (Safe-RLHF): a Lagrange multiplier trades one for the other."""

    cost: str = ""
    """Reward part that is a cost. Empty with no cost_model: no constraint."""
    cost_model: str = ""
    """HF sequence classifier with one label whose score is the cost."""
    limit: float = 0.0
    """Mean cost that is allowed."""
    multiplier: float = 1.0
    """Lagrange multiplier at the start."""
    lr: float = 0.1
    """Step size: the multiplier's logarithm moves by lr * multiplier * (mean cost - limit) a step."""
    most: float = 10.0
    """Largest multiplier."""
