"""A table of the built-in rewards. Grading processes import this module, so it avoids heavy imports.

The docstring of a reward's function describes its score; docs/rewards.md shows these docstrings.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward.

    If `pooled` is False, the reward is the function of the same name in a module of `spmdrl.rewards`.
    """

    module: str
    pooled: bool = False
    """True if the reward can be slow. A slow reward runs in grading processes, which get its function from the module's
    `load(name, settings)`."""
    runs_programs: bool = False
    """True if the reward can run programs and therefore needs the sandbox."""
    has_clocks: bool = False
    """True if the reward limits its own run time, so that no response can make it time out."""
    documented: str = ""
    """Name of the class or function in the module whose docstring describes the score. Empty if the name is the
    reward's own."""


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
