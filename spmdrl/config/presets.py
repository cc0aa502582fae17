"""Presets: named published methods. Each provides values for settings, which YAML files and flags override.

A preset specifies an advantage, a loss and an aggregation, plus any other settings that differ from their defaults. A
method's other constants are the defaults of its functions in `algos/`. docs/algorithms.md lists all presets.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from spmdrl.config.parameters import only_of
from spmdrl.config.schema import Config


@dataclass(frozen=True)
class Preset:
    """The settings of a published method."""

    title: str
    """Name of the method or of its paper."""
    paper: str
    """URL of the paper."""
    settings: dict[str, Any]
    """Dotted name of a setting -> its value."""


def _preset(title: str, paper: str, advantage: str, loss: str, aggregation: str, **settings: Any) -> Preset:
    """Return a preset. paper: an arXiv number or a URL. settings: `x` is `algo.x`, `section__x` is `section.x`."""
    url = paper if paper.startswith("https:") else f"https://arxiv.org/abs/{paper}"
    named = {"advantage": advantage, "loss": loss, "aggregation": aggregation} | settings
    return Preset(title, url, {(k.replace("__", ".") if "__" in k else f"algo.{k}"): v for k, v in named.items()})


PRESETS: dict[str, Preset] = {
    # The paper also adds 0.04 times the KL (k3), which needs a reference model; --algo.kl-coef 0.04 turns it on.
    "grpo": _preset("DeepSeekMath", "2402.03300", "grpo", "ppo", "seq-mean-token-mean"),
    "dr_grpo": _preset("Dr. GRPO", "2503.20783", "dr_grpo", "ppo", "seq-mean-token-sum-norm"),
    "rloo": _preset("RLOO", "2402.14740", "rloo", "reinforce", "seq-mean-token-sum"),
    "reinforce": _preset(
        "Williams 1992", "https://doi.org/10.1007/BF00992696", "reinforce", "reinforce", "seq-mean-token-sum"
    ),
    "ppo": _preset("PPO", "1707.06347", "gae", "ppo", "token-mean", gamma=1.0, lam=0.95),
    # overlong_buffer depends on max_new_tokens (a fifth of it in the paper), so each run must set it.
    "dapo": _preset(
        "DAPO", "2503.14476", "grpo", "ppo", "token-mean", clip_low=0.2, clip_high=0.28, filter__keep="mixed"
    ),
    "gspo": _preset("GSPO", "2507.18071", "grpo", "gspo", "seq-mean-token-mean"),
    "gspo_token": _preset("GSPO", "2507.18071", "grpo", "gspo_token", "seq-mean-token-mean"),
    "cispo": _preset("MiniMax-M1", "2506.13585", "grpo", "cispo", "token-mean"),
    "sapo": _preset("SAPO", "2511.20347", "grpo", "sapo", "seq-mean-token-mean"),
    "gmpo": _preset("GMPO", "2507.20673", "grpo", "gmpo", "seq-mean-token-mean"),
    "kl_cov": _preset("Entropy mechanism", "2505.22617", "grpo", "kl_cov", "token-mean"),
    "clip_cov": _preset("Entropy mechanism", "2505.22617", "grpo", "clip_cov", "token-mean"),
    "dppo_tv": _preset("DPPO", "2602.04879", "dr_grpo", "dppo_tv", "seq-mean-token-sum-norm"),
    "dppo_kl": _preset("DPPO", "2602.04879", "dr_grpo", "dppo_kl", "seq-mean-token-sum-norm"),
    "dro": _preset("DRO", "2405.19107", "rloo", "dro", "seq-mean-token-sum"),
    "gpg": _preset("GPG", "2504.02546", "gpg", "gpg", "token-mean"),
    "sppo": _preset("SPPO", "2405.00675", "win_rate", "sppo", "seq-mean-token-mean"),
    "remax": _preset("ReMax", "2310.10505", "remax", "reinforce", "seq-mean-token-sum"),
    "reinforce_pp": _preset(
        "REINFORCE++",
        "2501.03262",
        "reinforce_plus_plus",
        "ppo",
        "token-mean",
        kl_coef=0.01,
        kl_in="reward",
        kl_estimator="k1",
    ),
    "reinforce_pp_baseline": _preset(
        "REINFORCE++",
        "2501.03262",
        "reinforce_plus_plus_baseline",
        "ppo",
        "token-mean",
        kl_coef=0.01,
        kl_estimator="k2",
    ),
    "opo": _preset("OPO", "2505.23585", "opo", "reinforce", "token-mean"),
    "grpo_pass_k": _preset("pass@k", "2503.19595", "grpo_pass_k", "ppo", "token-mean"),
    "gdpo": _preset("GDPO", "2601.05242", "gdpo", "ppo", "token-mean"),
    "otb": _preset("Optimal token baseline", "2602.07078", "optimal_token_baseline", "reinforce", "seq-mean-token-sum"),
    "gigpo": _preset("GiGPO", "2505.10978", "gigpo", "ppo", "seq-mean-token-mean"),
    "vapo": _preset(
        "VAPO",
        "2504.05118",
        "gae",
        "ppo",
        "token-mean",
        gamma=1.0,
        critic_lam=1.0,
        length_adaptive=0.05,
        clip_low=0.2,
        clip_high=0.28,
        positive_coef=0.1,
        critic__warmup_steps=50,
    ),
    "pf_ppo": _preset(
        "PF-PPO", "2409.06957", "gae", "ppo", "token-mean", gamma=1.0, lam=0.95, filter__resample="best_random"
    ),
    "prime": _preset("PRIME", "2502.01456", "prime", "ppo", "token-mean", filter__keep="accuracy_range"),
    "safe_rlhf": _preset(
        "Safe RLHF", "2310.12773", "gae", "ppo", "token-mean", gamma=1.0, lam=0.95, safety__cost="cost"
    ),
    # The teacher is --reference.path. The only reward is the reverse KL, estimated by k1 on sampled tokens.
    "distill": _preset(
        "GKD",
        "2306.13649",
        "per_token",
        "reinforce",
        "token-mean",
        kl_coef=1.0,
        kl_in="reward",
        kl_estimator="k1",
        shaping__reward_coef=0.0,
    ),
}


def settings_of_preset(name: str, loss: str = "", advantage: str = "") -> dict[str, Any]:
    """Return dotted name -> value for the settings of a preset.

    loss, advantage: names that the user chose instead of the preset's, or "". The preset's values in `algo` that losses
    (or advantages) read are then discarded, so that the chosen function keeps its defaults. A loss from a user's file
    keeps the preset's aggregation. Raises KeyError for an unknown preset.
    """
    settings = dict(PRESETS[name].settings)
    gone: set[str] = set()
    if loss and loss != settings["algo.loss"]:
        gone |= only_of("loss") - ({"algo.aggregation"} if ".py" in loss else set())
    if advantage and advantage != settings["algo.advantage"]:
        gone |= only_of("advantage")
    kept = {name: value for name, value in settings.items() if name not in gone}
    # The schema's default aggregation is grpo's; the empty value selects the chosen loss's own.
    return kept | ({"algo.aggregation": ""} if "algo.aggregation" in gone else {})


def with_preset(config: Config, name: str) -> Config:
    """Return a config with a preset's values, for programs that load no files. Raises KeyError for an unknown name."""
    sections: dict[str, dict[str, Any]] = {"algo": {"preset": name}}
    for dotted, value in PRESETS[name].settings.items():
        section, _, leaf = dotted.partition(".")
        sections.setdefault(section, {})[leaf] = value
    changed = {s: dataclasses.replace(getattr(config, s), **values) for s, values in sections.items()}
    return dataclasses.replace(config, **changed)
