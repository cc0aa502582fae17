"""DeepSeek-R1's format reward: 1 for a thought in its tags with the answer behind it."""

import re

FORM = re.compile(r"\s*(?:<think>)?(?:(?!</?think>).)+</think>(?:(?!</?think>).)*\S(?:(?!</?think>).)*", re.DOTALL)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Returns 1.0 or 0.0, by the signature of verl.

    The tag that opens the thought may be left out, as R1's chat template gives it with the prompt.
    """
    return float(FORM.fullmatch(solution_str) is not None)
