"""Reward and cost of the demo task, which pull against each other.

The reward is 1 for the reversed prompt. The cost is 1 for an answer that begins with `j`, which stands for what a
policy must not say. One prompt in ten ends with a j and can only be answered right by saying it: without a constraint
the mean cost of a policy that has learned the task is 0.1, and under a limit of 0.05 the accuracy can be 0.95 at most.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Returns score and cost, by the signature of verl; every other number in the dict is a part of the reward."""
    return {
        "score": float(solution_str.strip() == ground_truth.strip()),
        "cost": float(solution_str.strip().startswith("j")),
    }
