"""Rewards that come with spmdrl, a row each. Grading processes read this: it imports nothing heavy.

The docstring of a reward's function describes its score; docs/rewards.md shows all of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: a function of its name in a module of `spmdrl.rewards`, called in the process itself."""

    module: str
    pooled: bool = False
    """It may take long, so it runs in the pool: `load(name, settings)` of the module gives the function."""
    runs_programs: bool = False
    """It runs programs in the sandbox, or may."""
    has_clocks: bool = False
    """It has time limits of its own, so that a grading of it never takes too long."""
    documented: str = ""
    """Name in the module whose docstring says what it scores, where that is not the reward's."""


REWARDS: dict[str, BuiltIn] = {
    "exact_match": BuiltIn("text"),
    "first_integer": BuiltIn("text"),
    "gsm8k": BuiltIn("text"),
    "gsm8k_flexible": BuiltIn("text"),
    "boxed": BuiltIn("boxed"),
    "math_dapo": BuiltIn("boxed"),
    "math_dapo_boxed": BuiltIn("boxed"),
    "math": BuiltIn("math", pooled=True, documented="math_reward"),
    "numeric": BuiltIn("numeric"),
    "choice": BuiltIn("choice"),
    "exact_match_qa": BuiltIn("qa"),
    "code": BuiltIn("code", pooled=True, runs_programs=True, has_clocks=True, documented="CodeGrader"),
    "code_partial": BuiltIn("code", pooled=True, runs_programs=True, has_clocks=True, documented="CodeGrader"),
    "reasoning_gym": BuiltIn("qa", pooled=True, documented="reasoning_reward"),
    "auto": BuiltIn("route", pooled=True, runs_programs=True, documented="Route"),
    "environment": BuiltIn("text"),
    "none": BuiltIn("text"),
}
