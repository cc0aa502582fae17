"""Settings of a divergence from a teacher, which two kinds of jobs have, and the rules for them."""

from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.config.declare import UNIT, at_least, setting
from spmdrl.config.fields import Problems


@dataclass
class DivergenceConfig:
    """The divergence that a student learns by."""

    beta: float = setting(1.0, UNIT, only_with=lambda c: c.has_teacher)
    """0: forward KL(teacher || student). 1: reverse KL(student || teacher). Between: the generalised Jensen-Shannon
    divergence of GKD (https://arxiv.org/abs/2306.13649)."""
    top_k: int = setting(0, at_least(0), only_with=lambda c: c.has_teacher)
    """Compare the teacher's K likeliest tokens of each place. 0: all tokens of the vocabulary."""
    tail: Literal["bucket", "renormalize"] = setting("bucket", only_with=lambda c: c.has_teacher)
    """All tokens that are not among the K: `bucket` counts them as one; `renormalize` leaves them out, and compares
    the distributions over the K tokens."""


def divergence_problems(config: Any, section: str) -> list[str]:
    """Return a line for each setting to change. config: of a job whose section of this name holds the divergence."""
    chosen, problems = getattr(config, section), Problems(config)
    if config.model.dtype == "float16":
        problems.add("model.dtype", "a divergence from a teacher has no loss scale; take bfloat16 or float32")
    if chosen.tail == "renormalize" and chosen.top_k < 2:
        why = "over one token both give it probability 1" if chosen.top_k else "no token is left out"
        problems.add(f"{section}.tail", f"with --{section}.top-k {chosen.top_k} {why}; take bucket")
    if config.policy.backend == "megatron":
        advice = "its ranks divide the vocabulary, and no divergence is computed over them; take fsdp"
        problems.add("policy.backend", advice)
    return problems


def divergence_words(chosen: DivergenceConfig, temperature: float) -> str:
    """Return the divergence in words, for the plan."""
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(chosen.beta, f"Jensen-Shannon divergence, beta {chosen.beta:g}")
    over = f"the teacher's {chosen.top_k:,} likeliest tokens" if chosen.top_k else "all tokens"
    return f"{kind} over {over}, temperature {temperature:g}"
