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
    """The learning method: advantage, loss, KL, and the optimizer updates of a step."""

    preset: str = "grpo"
    """Published method (docs/algorithms.md), which sets values in this and other sections; YAML files and flags
    override them."""
    advantage: str = "grpo"
    """Advantage estimator: a name of docs/algorithms.md, or path/to/file.py:function."""
    loss: str = "ppo"
    """Policy loss: a name of docs/algorithms.md, or path/to/file.py:function."""
    aggregation: str = "seq-mean-token-mean"
    """How the losses of tokens become one number. Empty: as in the paper of the loss."""
    updates_per_step: int = setting(1, COUNT)
    """Optimizer updates on the experience of one step; each update takes an equal share of the step's prompts."""
    gamma: float | None = setting(None, UNIT)
    """Discount factor for each token (gae, reinforce_plus_plus, gigpo, prime) or for each turn (turn_gae, turn_rloo).
    None, here and in settings below whose text gives it no other meaning: the method's default."""
    lam: float | None = setting(None, UNIT)
    """GAE lambda of the policy's advantages, for each token (gae) or for each turn (turn_gae)."""
    critic_lam: float | None = setting(None, UNIT)
    """GAE lambda of the returns that the critic learns. None: the lambda of the advantages."""
    length_adaptive: float | None = setting(None, POSITIVE)
    """VAPO's alpha, which makes lambda depend on the length: lambda = 1 - 1 / (alpha * sampled tokens). None: off."""
    step_weight: float | None = setting(None, NOT_NEGATIVE)
    """Weight with which gigpo adds a turn's advantage to the advantage of the episode."""
    part_weights: tuple[str, ...] = ()
    """Parts of the reward that GDPO normalises separately, as `name=weight`; the part `score` is the complete reward.
    Empty: the score and all parts, each with weight 1. If the score is the sum of the parts, name only the parts."""
    clip_low: float | None = setting(None, UNIT)
    """Lower clip bound: ratios below 1 - clip_low are clipped, unless the loss defines it differently."""
    clip_high: float | None = setting(None, NOT_NEGATIVE)
    """Upper clip bound: ratios above 1 + clip_high are clipped, unless the loss defines it differently."""
    dual_clip: float | None = setting(None, Rule(lambda x: 1 < x < math.inf, "must be above 1, or None for off"))
    """Dual-clip bound: for a negative advantage A, the loss ppo is at most -A * dual_clip. None: off."""
    tau_pos: float | None = setting(None, POSITIVE)
    """Temperature of SAPO's gate for tokens with a positive advantage."""
    tau_neg: float | None = setting(None, POSITIVE)
    """Temperature of SAPO's gate for tokens with a negative advantage or an advantage of 0."""
    cov_ratio: float | None = setting(None, SHARE)
    """Share of all tokens that the losses kl_cov and clip_cov select."""
    cov_kl_coef: float | None = setting(None, NOT_NEGATIVE)
    """Weight of kl_cov's penalty on the selected tokens."""
    cov_low: float | None = setting(None, FINITE)
    """The loss clip_cov selects only tokens whose covariance is above this number."""
    cov_high: float | None = setting(None, FINITE)
    """The loss clip_cov selects only tokens whose covariance is below this number."""
    ratio_cap: float | None = setting(None, at_least(1))
    """Largest ratio that the losses dppo_tv and dppo_kl use."""
    beta: float | None = setting(None, POSITIVE)
    """Weight of the quadratic penalty in the loss dro."""
    eta: float | None = setting(None, POSITIVE)
    """Step size eta of the loss sppo."""
    positive_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of an additional loss: the negative log-likelihood of responses with a reward above 0 (VAPO). 0: off."""
    kl_coef: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the KL divergence from the reference. 0: off."""
    kl_in: Literal["loss", "reward"] = setting("loss", only_with=lambda c: c.has_reference)
    """Use of the KL to the reference: it is added to the loss (`loss`), or subtracted from the reward (`reward`)."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = setting("k3", only_with=lambda c: c.has_reference)
    """Estimator of the KL from sampled tokens. With a + at the end, the gradient is k2's (straight-through)."""
    kl_target: float | None = setting(None, POSITIVE)
    """Target of the KL per token, in nats, such as 0.1: a controller changes `kl_coef` to keep the KL near it. None:
    `kl_coef` is constant."""
    kl_horizon: float = setting(10000.0, POSITIVE, only_with=lambda c: c.algo.kl_target is not None and c.has_reference)
    """Horizon of the KL controller in samples: the larger it is, the more slowly `kl_coef` changes."""
    entropy_coef: float = setting(0.0, FINITE)
    """Weight of the entropy bonus in the loss. 0: off."""
    old_logp: Literal["auto", "policy", "rollout"] = "auto"
    """Source of old_logp. `policy`: a separate forward of the policy before the updates. `rollout`: the engine's logp
    (bypass). `auto`: `rollout` with `--filter.replay-steps`; else the update's forward, at no cost, if a step makes one
    update and nothing reads old_logp before it; else `policy`."""
    skip_zero_advantage: bool = setting(False, only_with=advantage_alone)
    """Leave sequences whose advantage is exactly zero out of the forward, because their gradient is zero. Metrics over
    tokens (clip_fraction, ...) then exclude these sequences. Refused if the loss has terms that the advantage does not
    multiply."""


@dataclass
class CorrectionConfig:
    """Importance weights for the difference between engine and trainer (rollout_logp against old_logp)."""

    kind: Literal["auto", "none", "tis_token", "tis_sequence", "icepop", "mis_token", "mis_sequence"] = "auto"
    """Truncated (tis) or masked (mis, icepop) importance sampling, by token or by sequence. `auto`: tis_token if
    samples may come from other weights than the trainer's (rollout.staleness, rollout.partial_steps,
    rollout.quantization) and old_logp is not the engine's, else none."""
    low: float | None = setting(None, NOT_NEGATIVE, only_with=lambda c: correction(c) != "none")
    """Lower bound of a ratio; smaller ratios are masked (icepop, mis). None: the default of `kind`."""
    high: float | None = setting(None, POSITIVE, only_with=lambda c: correction(c) != "none")
    """Upper bound of a ratio; larger ratios are truncated (tis) or masked (icepop, mis). None: the default of
    `kind`."""
    reject_low: float | None = setting(None, NOT_NEGATIVE)
    """Sequences whose geometric mean of ratios is below this number are masked. None: off."""
    reject_high: float | None = setting(None, POSITIVE)
    """Sequences whose geometric mean of ratios is above this number are masked. None: off."""


@dataclass
class ShapingConfig:
    """Changes to rewards before advantages are computed."""

    reward_coef: float = setting(1.0, FINITE)
    """Factor on the reward. With 0 the policy does not learn from rewards, as in distillation."""
    clip_low: float | None = setting(None, FINITE)
    """Rewards below this number are raised to it. None: no bound."""
    clip_high: float | None = setting(None, FINITE)
    """Rewards above this number are lowered to it. None: no bound."""
    normalize: Literal["none", "batch", "running"] = "none"
    """Normalise rewards to mean 0 and standard deviation 1, over the step (`batch`) or over the run so far
    (`running`)."""
    overlong_buffer: int = setting(0, NOT_NEGATIVE)
    """DAPO's soft penalty of overlong responses begins this number of tokens before max_new_tokens. 0: no penalty."""
    overlong_factor: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.shaping.overlong_buffer)
    """Size of DAPO's overlong penalty for a response of max_new_tokens tokens."""
    mask_cut: bool = setting(False, only_with=lambda c: c.has_advantages)
    """Leave responses that were cut at max_new_tokens out of the loss (DAPO's overlong filtering)."""
    length_penalty: Literal["none", "linear", "group"] = "none"
    """Penalty for long responses. `linear`: it grows with the length, up to length_coef at max_new_tokens. `group`: it
    depends on where the length lies between the shortest and the longest response of the group (Kimi k1.5)."""
    length_coef: float = setting(1.0, FINITE, only_with=lambda c: c.shaping.length_penalty != "none")
    """Weight of the length penalty."""


@dataclass
class FilterConfig:
    """Choice of the samples that the policy learns from."""

    keep: str = ""
    """Groups that are kept: `mixed` (rewards in the group differ), `accuracy_range` (the group's mean reward lies
    between `low` and `high`), or those that path/to/file.py:function selects. Further prompts are sampled until
    prompts_per_step groups are kept. Empty: all groups are kept."""
    metric: str = setting("", only_with=lambda c: c.filter.keep)
    """Part of the reward that `keep` reads; it counts as 0 if the grading timed out. Empty: the complete reward."""
    low: float = setting(0.2, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Lowest group mean that accuracy_range keeps."""
    high: float = setting(0.8, FINITE, only_with=lambda c: c.filter.keep == "accuracy_range")
    """Highest group mean that accuracy_range keeps."""
    max_rounds: int = setting(10, COUNT, free=Free.LIMIT, only_with=lambda c: c.filter.keep)
    """Maximum number of rounds, each of prompts_per_step prompts, that a step may sample to find enough groups. The run
    ends if they do not suffice."""
    resample: str = setting("none", only_with=lambda c: c.has_advantages)
    """How PF-PPO draws the sequences to learn from, with replacement, by their rewards: `pow` (in proportion to
    |reward| to the power 2, or p with `pow=p`), `max_min`, `max_random`, or within each group `best_random`,
    `best_worst`. `none`: no sequence is preferred."""
    replay_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_advantages)
    """Number of earlier steps from which sequences are drawn, too (off-policy: old_logp is the engine's)."""
    bad_sample: Literal["stop", "skip"] = setting("stop", free=Free.LIMIT)
    """If a reward or an engine's logp is not a number, `stop` ends the job and names the sample, and `skip` leaves the
    sample out and counts it."""


def resampling(text: str) -> tuple[str, float]:
    """Return the method that `--filter.resample` names, and the power of `pow`. Raises ValueError for another form."""
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
    """The value model of GAE."""

    path: str = setting("", only_with=lambda c: "critic" in needs(c))
    """Model that the critic starts from, in a form that `--model.path` takes; a language model gets a value head of
    zeros. Empty: the model of `--model.path`."""
    lr: float = setting(5e-4, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """Peak learning rate of the critic; its other optimizer settings are those of the policy."""
    clip: float | None = setting(0.2, POSITIVE, only_with=lambda c: "critic" in needs(c))
    """Change of a value in one step beyond which its loss is clipped (PPO's value clipping). None: no limit."""
    warmup_steps: int = setting(0, NOT_NEGATIVE, only_with=lambda c: "critic" in needs(c))
    """Number of first steps in which the critic learns and the policy does not (VAPO's value pretraining)."""


@dataclass
class ProcessRewardConfig:
    """The implicit process reward model of PRIME, trained on outcomes during the run."""

    path: str = setting("", only_with=lambda c: "process" in needs(c))
    """Model that the process reward model and its reference start from. Empty: the model of `--model.path`."""
    lr: float = setting(1e-6, NOT_NEGATIVE, only_with=lambda c: "process" in needs(c))
    """Peak learning rate of the process reward model."""
    beta: float = setting(0.05, POSITIVE, only_with=lambda c: "process" in needs(c))
    """Scale of process rewards: the reward of a token is beta * (logp - logp of the model's reference)."""
    process_coef: float = setting(1.0, FINITE)
    """Weight of process rewards in the advantage."""
    outcome_coef: float = setting(1.0, FINITE)
    """Weight of the response's reward (the outcome) in the advantage."""


@dataclass
class SafetyConfig:
    """A constraint on a cost in addition to the reward (Safe-RLHF), weighted by a Lagrange multiplier."""

    cost: str = ""
    """Part of the reward that is the cost. If this and `cost_model` are empty, there is no constraint."""
    cost_model: str = ""
    """HF sequence classifier with one label whose score is the cost."""
    limit: float = setting(0.0, FINITE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Largest mean cost that is allowed."""
    multiplier: float = setting(1.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Lagrange multiplier at the start of the run."""
    lr: float = setting(0.1, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Step size of the multiplier: in each step its logarithm changes by lr * multiplier * (mean cost - limit)."""
    most: float = setting(10.0, POSITIVE, only_with=lambda c: c.safety.cost or c.safety.cost_model)
    """Largest value that the multiplier may reach."""
