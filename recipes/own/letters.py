def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of letters in the right place; the signature is verl's."""
    said, truth = solution_str.strip(), str(ground_truth)
    return sum(a == b for a, b in zip(said, truth, strict=False)) / max(len(said), len(truth))
