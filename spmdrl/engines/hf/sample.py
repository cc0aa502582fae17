"""Draws one token for each row of a group from its logits.

Shapes: B rows, V vocabulary size.
"""

import torch

from spmdrl.engines.hf.decode import Group
from spmdrl.spmd.seeds import uniform


def sample(logits_BV: torch.Tensor, group: Group, position_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the next token of each row [B], with its logp [B], by inverse transform sampling within top_p.

    A greedy row (temperature 0) takes the most likely token instead, with logp at temperature 1.
    """
    greedy = group.temperature == 0
    scaled_BV = logits_BV / torch.where(greedy, 1.0, group.temperature)[:, None].to(logits_BV.dtype)
    # On CPU, float64 is used because torch sums a row's exponentials in a few float32 accumulators: with a vocabulary
    # of 150,000 tokens, logp would be wrong in the fourth digit.
    logp_BV = torch.log_softmax(scaled_BV.double() if scaled_BV.is_cpu else scaled_BV, -1)
    if bool((group.top_p < 1).any()):
        logp_BV = nucleus(logp_BV, group.top_p)
    # Cumulative sums are in float64, because float32 would bias the tail of a large vocabulary.
    cumulative = running_sum(logp_BV.double().exp())
    u = uniform(group.seeds, position_B)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, u, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    # Parallel sums on a GPU can round up at a token of probability 0, so such a token could be drawn.
    impossible = logp_BV.gather(1, drawn[:, None])[:, 0] == -torch.inf
    tokens = torch.where(greedy | impossible, logits_BV.argmax(-1), drawn)
    return tokens, logp_BV.gather(1, tokens[:, None])[:, 0].to(logits_BV.dtype)


def running_sum(p_BV: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of probabilities along each row.

    On GPU, float cumsum adds in no fixed order, so torch raises an error under `--run.deterministic`. Integers in units
    of 2^-52 are then summed instead, because integer sums do not depend on the order.
    """
    if p_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return in_integers(p_BV)
    return p_BV.cumsum(-1)


def in_integers(p_BV: torch.Tensor) -> torch.Tensor:
    """Round numbers in [0, 1] down to multiples of 2^-52, and return their exact cumulative sums."""
    unit = 2.0**52
    return ((p_BV.double() * unit).long().cumsum(-1).double() / unit).to(p_BV.dtype)


def nucleus(logp_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens whose total probability reaches top_p, and renormalize.

    Source: https://arxiv.org/abs/1904.09751
    """
    ordered, index = logp_BV.sort(-1, descending=True)
    before = running_sum(ordered.exp()) - ordered.exp()
    dropped = torch.zeros_like(logp_BV, dtype=torch.bool).scatter(1, index, before >= top_p_B[:, None])
    return torch.log_softmax(logp_BV.masked_fill(dropped, float("-inf")), -1)
