"""A custom reward: `--reward.function recipes/own/reward.py` (its `compute_score`, or another function with `:name`).

The signature is that of verl. It returns a number, or a dict with `score` and other numbers. These are parts of the
reward: they are logged as reward/part/<name>, and --filter.metric, --algo.part-weights or --safety.cost can name them.
The function runs in a separate process and is killed after --reward.timeout seconds.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return 1 for the right answer. Parts: `match`, the same; `place`, the share of letters at the right position."""
    response, truth = solution_str.strip(), str(ground_truth).strip()
    match = float(response == truth)
    right = sum(a == b for a, b in zip(response, truth, strict=False))
    return {"score": match, "match": match, "place": right / max(len(response), len(truth))}
