"""The reward of verl's Geometry3K example: 0.9 for the right answer in a box, and 0.1 for the form.

The form is thinking between <think> and </think>, and a box with the answer behind it. `math`, the built-in reward,
compares answers (docs/rewards.md).
"""

from spmdrl.rewards.base import RewardInput
from spmdrl.rewards.math import last_boxed, math_reward

FORM = 0.1


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return the score, and as parts whether the answer is right (`acc`) and whether the form is kept (`format`).

    The signature is that of verl. `eval/accuracy` counts `acc`.
    """
    boxed = last_boxed(solution_str) is not None
    right = boxed and math_reward(RewardInput(data_source, solution_str, ground_truth)).score == 1
    thought, end, answer = solution_str.partition("</think>")
    form = bool(end) and thought.startswith("<think>") and last_boxed(answer) is not None
    return {"score": (1 - FORM) * right + FORM * form, "acc": float(right), "format": float(form)}
