"""Has vLLM read given sequences: the likeliest tokens at their last places.

A request takes a sequence without its last token as the prompt: vLLM tells of every prompt token, and of the one token
that it generates in the last one's place. n places; k tokens.
"""

from typing import Any

import torch

from spmdrl.health.status import tick
from spmdrl.rollout.engine import Given, Likeliest
from spmdrl_kernels.divergence import log_of_rest


def likeliest(engine: Any, given: list[Given], k: int) -> list[Likeliest]:
    """Return the k likeliest tokens by log-probabilities at temperature 1. engine: vLLM's, on which nothing runs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        seed=0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=k,
        logprobs=k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number, each in enumerate(given):
        engine.add_request(f"read {number}", {"prompt_token_ids": each.tokens[:-1]}, params)
    out: dict[str, Likeliest] = {}
    while len(out) < len(given):
        tick()
        for found in engine.step():
            if found.finished:
                count = given[int(found.request_id.split()[1])].count
                # vLLM tells nothing of the first prompt token.
                rows = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs][-count:]
                out[found.request_id] = _taken(rows, k)
    return [out[f"read {number}"] for number in range(len(given))]


def _taken(rows: list[dict[int, Any]], k: int) -> Likeliest:
    """The k likeliest of each place; a row also has the token that stands there, whatever its rank."""
    ranked = [sorted(row.items(), key=lambda item: (item[1].rank, -item[1].logprob))[:k] for row in rows]
    ids_nk = torch.tensor([[token for token, _ in row] for row in ranked], dtype=torch.int64)
    logp_nk = torch.tensor([[told.logprob for _, told in row] for row in ranked], dtype=torch.float32)
    return ids_nk, logp_nk, log_of_rest(logp_nk)
