"""A table of the rewards that come with spmdrl. Grading processes import this module, so it imports nothing heavy.

The docstring of a reward's function describes the reward's score; docs/rewards.md shows these docstrings.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: a function in a module of `spmdrl.rewards`, named like the reward unless it is `pooled`."""

    module: str
    pooled: bool = False
    """True if the reward may take long, so that grading processes run it; they get the function from
    `load(name, settings)` of the module."""
    runs_programs: bool = False
    """True if the reward may run programs, so that it needs the sandbox."""
    has_clocks: bool = False
    """True if the reward limits its own time, so that no response can make its grading time out."""
    documented: str = ""
    """Name, in the module, of the class or function with the docstring about the score; empty: the reward's name."""


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
