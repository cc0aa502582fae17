"""DeepSeek-R1's format reward: 1 for thinking in <think> tags with an answer after it."""

import re

FORM = re.compile(r"\s*(?:<think>)?(?:(?!</?think>).)+</think>(?:(?!</?think>).)*\S(?:(?!</?think>).)*", re.DOTALL)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return 1.0 if the response has the format, else 0.0. The signature is that of verl.

    The opening tag may be missing, because R1's chat template adds it to the prompt.
    """
    return float(FORM.fullmatch(solution_str) is not None)
