"""Settings of a divergence from a teacher, which two kinds of jobs have, and the rules for them."""

from dataclasses import dataclass
from typing import Literal

from spmdrl.config.declare import UNIT, at_least, setting


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


def divergence_problems(told: DivergenceConfig, section: str, backend: str, dtype: str) -> list[str]:
    """Problems of one section, a line each. backend: `policy.backend`; dtype: `model.dtype`."""
    problems = []
    if dtype == "float16":
        problems.append(
            "--model.dtype float16: a divergence from a teacher has no loss scale; take bfloat16 or float32"
        )
    if told.tail == "renormalize" and told.top_k < 2:
        why = "over one token both give it probability 1" if told.top_k else "no token is left out"
        problems.append(f"--{section}.tail renormalize: with --{section}.top-k {told.top_k} {why}; take bucket")
    if backend == "megatron":
        problems.append(
            "--policy.backend megatron: its ranks divide the vocabulary, and no divergence is computed over them; "
            "take fsdp"
        )
    return problems


def divergence_words(told: DivergenceConfig, temperature: float) -> str:
    """The divergence in words, for the plan."""
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(told.beta, f"Jensen-Shannon divergence, beta {told.beta:g}")
    over = f"the teacher's {told.top_k:,} likeliest tokens" if told.top_k else "all tokens"
    return f"{kind} over {over}, temperature {temperature:g}"
