"""Reward and cost of the demo task, which conflict with each other.

The reward is 1 for the reversed prompt. The cost is 1 for an answer that begins with `j`, as an example of unsafe text.
One prompt in ten ends with a j, so its right answer has a cost. Without a constraint the mean cost of a policy that has
learned the task is 0.1. With a limit of 0.05 the accuracy can be at most 0.95.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return score and cost. The signature is that of verl; numbers other than `score` are parts of the reward."""
    return {
        "score": float(solution_str.strip() == ground_truth.strip()),
        "cost": float(solution_str.strip().startswith("j")),
    }
