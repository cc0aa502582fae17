"""Settings of the learning method, as nested dataclasses: the sections that belong to `algos/`.

`schema.py` adds them to the other settings of a run; the text under a field is its `--help`. Presets (`presets.py`) set
fields of this module and of `schema.py` by name.
"""

import math
from dataclasses import dataclass
from typing import Literal

from spmdrl.config.composition import advantage_alone, correction, needs
from spmdrl.config.declare import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, SHARE, UNIT, Free, Rule, at_least, setting


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
    updates_per_step: int = setting(1, COUNT)
    """Optimizer steps on one step's experience; each takes an equal share of its prompts."""
    gamma: float | None = setting(None, UNIT)
    """Discount factor by token (gae, reinforce_plus_plus, gigpo, prime) or by turn (turn_gae, turn_rloo). None, for
    this and the following settings: the method's own value."""
    lam: float | None = setting(None, UNIT)
    """GAE lambda of the policy's advantages (gae by token, turn_gae by turn)."""
    critic_lam: float | None = setting(None, UNIT)
    """GAE lambda of the returns the critic learns; None: the same lambda."""
    length_adaptive: float | None = setting(None, POSITIVE)
    """VAPO's alpha: lambda = 1 - 1 / (alpha * sampled tokens); None: off."""
    step_weight: float | None = setting(None, NOT_NEGATIVE)
    """Weight of GiGPO's step advantage."""
    part_weights: tuple[str, ...] = ()
    """Reward parts that GDPO normalises separately, as `name=weight`; the part `score` is the reward itself. Empty: the
    score and all parts, each with weight 1 (if the score is the sum of the parts, name only the parts)."""
    clip_low: float | None = setting(None, UNIT)
    """Lower clip bound: a ratio of 1 - clip_low, or as the loss defines it."""
    clip_high: float | None = setting(None, NOT_NEGATIVE)
    """Upper clip bound: a ratio of 1 + clip_high, or as the loss defines it."""
    dual_clip: float | None = setting(None, Rule(lambda x: 1 < x < math.inf, "must be above 1, or None for off"))
    """Dual-clip bound of ppo for negative advantages; None: off."""
    tau_pos: float | None = setting(None, POSITIVE)
    """SAPO's temperature for positive advantages."""
    tau_neg: float | None = setting(None, POSITIVE)
    """SAPO's temperature for all other advantages."""
    cov_ratio: float | None = setting(None, SHARE)
    """Share of all tokens that kl_cov and clip_cov select."""
    cov_kl_coef: float | None = setting(None, NOT_NEGATIVE)
    """Weight of kl_cov's penalty on the selected tokens."""
    cov_low: float | None = setting(None, FINITE)
    """clip_cov draws among tokens whose covariance is above this."""
    cov_high: float | None = setting(None, FINITE)
    """clip_cov draws among tokens whose covariance is below this."""
    ratio_cap: float | None = setting(None, at_least(1))
    """Largest ratio in dppo_tv and dppo_kl."""
    beta: float | None = setting(None, POSITIVE)
    """Weight of dro's quadratic penalty."""
    eta: float | None = setting(None, POSITIVE)
    """SPPO's step size."""
    positive_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the likelihood of responses with a reward above 0 (VAPO)."""
    kl_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of KL to the reference."""
    kl_in: Literal["loss", "reward"] = setting("loss", only_with=lambda c: c.has_reference)
    """Term that the KL to the reference is added to: the loss, or the reward."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = setting("k3", only_with=lambda c: c.has_reference)
    """Estimator of KL from sampled tokens (a trailing + is the straight-through form)."""
    kl_target: float | None = setting(None, POSITIVE)
    """Target of the KL per token in nats, such as 0.1, to which a controller adapts `kl_coef`. None: `kl_coef` is
    constant."""
    kl_horizon: float = setting(10000.0, POSITIVE, only_with=lambda c: c.algo.kl_target is not None and c.has_reference)
    """Horizon of the KL controller in samples: the larger it is, the more slowly `kl_coef` changes."""
    entropy_coef: float = setting(0.0, FINITE)
    """Weight of the entropy bonus."""
    old_logp: Literal["auto", "policy", "rollout"] = "auto"
    """Source of old_logp: a separate forward of the policy, or the engine's logp (bypass). `auto`: the update's own
    forward if that gives the same values at no cost (one update a step), else a separate forward of the policy."""
    skip_zero_advantage: bool = setting(False, only_with=advantage_alone)
    """Leave sequences whose advantage is exactly zero out of the forward, as their gradient is zero; statistics of
    tokens (clip_fraction, ...) then exclude them. Refused if the loss has terms that the advantage does not
    multiply."""


@dataclass
class CorrectionConfig:
    """Importance weights for the difference between engine and trainer (rollout_logp against old_logp)."""

    kind: Literal["auto", "none", "tis_token", "tis_sequence", "icepop", "mis_token", "mis_sequence"] = "auto"
    """Truncated (tis) or masked (mis, icepop) importance sampling, by token or by sequence. `auto`: tis_token where
    samples come from other weights (rollout.staleness, rollout.partial_steps, rollout.quantization), else none."""
    low: float | None = setting(None, NOT_NEGATIVE, only_with=lambda c: correction(c) != "none")
    """Lower bound: smaller ratios are masked (icepop, mis). None: the method's own."""
    high: float | None = setting(None, POSITIVE, only_with=lambda c: correction(c) != "none")
    """Upper bound: larger ratios are truncated (tis) or masked (icepop, mis). None: the method's own."""
    reject_low: float | None = setting(None, NOT_NEGATIVE)
    """Sequences whose geometric mean ratio is smaller are masked. None: off."""
    reject_high: float | None = setting(None, POSITIVE)
    """Sequences whose geometric mean ratio is larger are masked. None: off."""


@dataclass
class ShapingConfig:
    """Changes to rewards before advantages are computed."""

    reward_coef: float = setting(1.0, FINITE)
    """Factor on the reward; with 0, only the KL to the reference or teacher remains."""
    clip_low: float | None = setting(None, FINITE)
    """Smallest reward; None: no bound."""
    clip_high: float | None = setting(None, FINITE)
    """Largest reward; None: no bound."""
    normalize: Literal["none", "batch", "running"] = "none"
    """Normalise rewards to mean 0 and standard deviation 1, over the step (`batch`) or over the run so far
    (`running`)."""
    overlong_buffer: int = setting(0, NOT_NEGATIVE)
    """DAPO's soft penalty of overlong responses begins this many tokens before max_new_tokens. 0: off."""
    overlong_factor: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.shaping.overlong_buffer)
    """Size of DAPO's overlong penalty at max_new_tokens."""
    mask_cut: bool = setting(False, only_with=lambda c: c.has_advantages)
    """Leave responses that were cut at max_new_tokens out of the loss (DAPO's overlong filtering)."""
    length_penalty: Literal["none", "linear", "group"] = "none"
    """`linear`: grows with the length, up to length_coef at max_new_tokens. `group`: depends on the length between the
    group's shortest and longest response (Kimi k1.5)."""
    length_coef: float = setting(1.0, FINITE, only_with=lambda c: c.shaping.length_penalty != "none")
    """Weight of the length penalty."""


@dataclass
class FilterConfig:
    """Choice of the samples that the policy learns from."""

    keep: str = ""
    """Groups that are kept: `mixed` (their rewards differ), `accuracy_range` (their mean lies between `low` and
    `high`), or path/to/file.py:function. Further prompts are sampled until prompts_per_step groups are kept. Empty: all
    groups are kept."""
    metric: str = setting("", only_with=lambda c: c.filter.keep)
    """Reward part that `keep` reads (0 if the grading timed out). Empty: the reward."""
    low: float = setting(0.2, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Lowest group mean that accuracy_range keeps."""
    high: float = setting(0.8, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Highest group mean that accuracy_range keeps."""
    max_rounds: int = setting(10, COUNT, free=Free.LIMIT, only_with=lambda c: c.filter.keep)
    """Most rounds of prompts_per_step prompts that one step may sample to find enough groups; after these the run
    stops."""
    resample: str = setting("none", only_with=lambda c: c.has_advantages)
    """PF-PPO: draw the sequences to learn from by their reward, with replacement: `pow` (|reward| to the power 2, or to
    p by `pow=p`), `max_min`, `max_random`, or within each group `best_random`, `best_worst`."""
    replay_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_advantages)
    """Number of earlier steps whose sequences are drawn as well (off-policy: old_logp is the engine's)."""
    bad_sample: Literal["stop", "skip"] = setting("stop", free=Free.LIMIT)
    """If a reward or an engine's logp is not a number, `stop` ends the job and names the sample, and `skip` leaves the
    sample out and counts it."""


def resampling(text: str) -> tuple[str, float]:
    """Return the method of `--filter.resample` and the power of `pow`. Raises ValueError for another form."""
    # Imported late: algos/ needs torch, and `--help` must work without it.
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
    """The value model of GAE."""

    path: str = setting("", only_with=lambda c: "critic" in needs(c))
    """Model that the critic starts from, as `--model.path` (a language model gets a value head of zeros). Empty:
    `--model.path`."""
    lr: float = setting(5e-4, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """Peak learning rate of the critic; its other optimizer settings are the policy's."""
    clip: float | None = setting(0.2, POSITIVE, only_with=lambda c: "critic" in needs(c))
    """Largest change of a value in one step, as in PPO's value clipping; None: off."""
    warmup_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """First steps of the run in which the critic learns and the policy does not (VAPO's value pretraining)."""


@dataclass
class ProcessRewardConfig:
    """The implicit process reward model of PRIME, trained on outcomes during the run."""

    path: str = setting("", only_with=lambda c: "process" in needs(c))
    """Model that the process reward model and its reference start from. Empty: `--model.path`."""
    lr: float = setting(1e-6, NOT_NEGATIVE, only_with=lambda c: "process" in needs(c))
    """Peak learning rate."""
    beta: float = setting(0.05, POSITIVE, only_with=lambda c: "process" in needs(c))
    """The reward of a token is beta * (logp - logp of the reference)."""
    process_coef: float = setting(1.0, FINITE)
    """Weight of process rewards in the advantage."""
    outcome_coef: float = setting(1.0, FINITE)
    """Weight of the outcome in the advantage."""


@dataclass
class SafetyConfig:
    """A constraint on a cost in addition to the reward (Safe-RLHF), weighted by a Lagrange multiplier."""

    cost: str = ""
    """Reward part that is the cost. If this and `cost_model` are empty, there is no constraint."""
    cost_model: str = ""
    """HF sequence classifier with one label whose score is the cost."""
    limit: float = setting(0.0, FINITE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Largest mean cost that is allowed."""
    multiplier: float = setting(1.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Lagrange multiplier at the start."""
    lr: float = setting(0.1, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Step size: the multiplier's logarithm moves by lr * multiplier * (mean cost - limit) a step."""
    most: float = setting(10.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Largest multiplier."""
