"""Settings of a divergence from a teacher, for distillation and supervised fine-tuning, and their rules."""

from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.config.declare import UNIT, at_least, setting
from spmdrl.config.fields import Problems


@dataclass
class DivergenceConfig:
    """The loss of a student: its divergence from a teacher."""

    beta: float = setting(1.0, UNIT, only_with=lambda c: c.has_teacher)
    """Kind of divergence. 0: forward KL(teacher || student). 1: reverse KL(student || teacher). Values between: GKD's
    generalised Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649)."""
    top_k: int = setting(0, at_least(0), only_with=lambda c: c.has_teacher)
    """Number K of tokens that are compared at each position: the most likely ones of the teacher. 0: all tokens of the
    vocabulary."""
    tail: Literal["bucket", "renormalize"] = setting("bucket", only_with=lambda c: c.has_teacher)
    """Treatment of tokens that are not among the K most likely ones (`top_k`): `bucket` counts them as one token;
    `renormalize` leaves them out and renormalises both distributions over the K tokens."""


def divergence_problems(config: Any, section: str) -> list[str]:
    """Return a line for each setting that is in conflict with the divergence in the section `section` of `config`."""
    chosen, problems = getattr(config, section), Problems(config)
    if config.model.dtype == "float16":
        problems.add("model.dtype", "a divergence from a teacher has no loss scale; take bfloat16 or float32")
    if chosen.tail == "renormalize" and chosen.top_k < 2:
        why = "both models then give their only token probability 1" if chosen.top_k else "no token is left out"
        problems.add(f"{section}.tail", f"with --{section}.top-k {chosen.top_k} {why}; take bucket")
    if config.policy.backend == "megatron":
        advice = "its ranks divide the vocabulary, over which the divergence is not implemented; take fsdp"
        problems.add("policy.backend", advice)
    return problems


def divergence_words(chosen: DivergenceConfig, temperature: float) -> str:
    """Return the divergence in words, for the lines that a run prints at its start."""
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(chosen.beta, f"Jensen-Shannon divergence, beta {chosen.beta:g}")
    over = f"the teacher's {chosen.top_k:,} likeliest tokens" if chosen.top_k else "all tokens"
    return f"{kind} over {over}, temperature {temperature:g}"
