"""A reward of your own: `--reward.function recipes/own/reward.py` (its `compute_score`, or `:name` for another).

The signature is verl's. It returns a number, or a dict with `score` and named parts: other numbers, which are logged
as reward/part/<name> and can be what --filter.metric, --algo.part-weights or --safety.cost ask for. It runs in a
process of its own and is killed after --reward.timeout seconds.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for the right answer. Parts: `match`, the same; `place`, the share of letters that are where they belong."""
    response, truth = solution_str.strip(), str(ground_truth).strip()
    match = float(response == truth)
    right = sum(a == b for a, b in zip(response, truth, strict=False))
    return {"score": match, "match": match, "place": right / max(len(response), len(truth))}
