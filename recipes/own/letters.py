def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of letters in the right place; the signature is verl's."""
    response, truth = solution_str.strip(), str(ground_truth)
    return sum(a == b for a, b in zip(response, truth, strict=False)) / max(len(response), len(truth))
