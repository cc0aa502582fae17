"""Runs a packed model on the tensors of a pack."""


def run_pack(model, tokens, lengths, mask, temperature, second="entropy", begins=None):
    """Returns the head's tensors of a pack."""
    return model(model.plan(tokens, lengths, mask, begins), temperature, second)
