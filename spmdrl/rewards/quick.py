"""Built-in rewards that are quick and certain to end, whatever a response holds."""

from collections.abc import Callable

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.boxed import boxed
from spmdrl.rewards.choice import choice
from spmdrl.rewards.dapo import math_dapo, math_dapo_boxed
from spmdrl.rewards.gsm8k import gsm8k, gsm8k_flexible
from spmdrl.rewards.numeric import numeric
from spmdrl.rewards.qa import exact_match_qa
from spmdrl.rewards.text import environment, exact_match, first_integer, none

QUICK: dict[str, Callable[[RewardInput], Reward]] = {
    "boxed": boxed,
    "choice": choice,
    "environment": environment,
    "exact_match": exact_match,
    "exact_match_qa": exact_match_qa,
    "first_integer": first_integer,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "math_dapo": math_dapo,
    "math_dapo_boxed": math_dapo_boxed,
    "none": none,
    "numeric": numeric,
}
"""Called in the process itself."""
