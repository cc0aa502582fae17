"""Computes the most likely tokens at the last positions of existing sequences with vLLM.

Each request's prompt is a sequence without its last token, and one token is generated. vLLM then reports the most
likely tokens at every prompt position and at the generated position, which is the sequence's last position.

Shapes: n positions, k tokens.
"""

from typing import Any

import torch

from spmdrl.engines.engine import Likeliest, ScoreRequest
from spmdrl.health.status import tick
from spmdrl_kernels.divergence import log_of_rest


def likeliest(engine: Any, requests: list[ScoreRequest], k: int) -> list[Likeliest]:
    """Return the k most likely tokens at each position to score, at temperature 1.

    engine: vLLM's LLMEngine, which must have no other requests.
    """
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
    for number, each in enumerate(requests):
        engine.add_request(f"read {number}", {"prompt_token_ids": each.tokens[:-1]}, params)
    out: dict[str, Likeliest] = {}
    while len(out) < len(requests):
        tick()
        for found in engine.step():
            if found.finished:
                count = requests[int(found.request_id.split()[1])].count
                # vLLM has no log-probabilities for the first prompt token.
                rows = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs][-count:]
                out[found.request_id] = _top(rows, k)
    return [out[f"read {number}"] for number in range(len(requests))]


def _top(rows: list[dict[int, Any]], k: int) -> Likeliest:
    """Return the k most likely tokens at each position.

    rows: vLLM's dict of the most likely tokens at each position, which also includes the sequence's own token.
    """
    ranked = [sorted(row.items(), key=lambda item: (item[1].rank, -item[1].logprob))[:k] for row in rows]
    ids_nk = torch.tensor([[token for token, _ in row] for row in ranked], dtype=torch.int64)
    logp_nk = torch.tensor([[entry.logprob for _, entry in row] for row in ranked], dtype=torch.float32)
    return ids_nk, logp_nk, log_of_rest(logp_nk)
