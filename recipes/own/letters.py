def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return the share of letters that are at the right position. The signature is that of verl."""
    response, truth = solution_str.strip(), str(ground_truth)
    return sum(a == b for a, b in zip(response, truth, strict=False)) / max(len(response), len(truth))
