"""Settings for the divergence from a teacher, for distillation and supervised fine-tuning, with their rules."""

from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.config.declare import UNIT, at_least, setting
from spmdrl.config.fields import Problems


@dataclass
class DivergenceConfig:
    """The student's loss: its divergence from a teacher."""

    beta: float = setting(1.0, UNIT, only_with=lambda c: c.has_teacher)
    """Divergence to minimise. 0: forward KL(teacher || student). 1: reverse KL(student || teacher). Values between:
    GKD's generalised Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649)."""
    top_k: int = setting(0, at_least(0), only_with=lambda c: c.has_teacher)
    """Compare only the teacher's K most likely tokens at each position. 0: the full vocabulary."""
    tail: Literal["bucket", "renormalize"] = setting("bucket", only_with=lambda c: c.has_teacher)
    """How tokens outside the top K (`top_k`) are handled: `bucket` merges them into a single token; `renormalize` drops
    them and renormalises both distributions over the K tokens."""


def divergence_problems(config: Any, section: str) -> list[str]:
    """Return a line for each setting that conflicts with the divergence settings in the section `section`."""
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
    """Return a description of the divergence, for the lines that a run prints at startup."""
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(chosen.beta, f"Jensen-Shannon divergence, beta {chosen.beta:g}")
    over = f"the teacher's {chosen.top_k:,} likeliest tokens" if chosen.top_k else "all tokens"
    return f"{kind} over {over}, temperature {temperature:g}"
