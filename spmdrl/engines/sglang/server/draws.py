"""Makes SGLang draw tokens like the HF engine, from seeds that depend only on data, not on ranks."""

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch


def shared(file: str) -> Any:
    """Load a module of spmdrl that needs only torch and xxhash, by its path."""
    path = Path(__file__).parents[3] / file
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


seeds = shared("spmd/seeds.py")


def seed_at(seed: int, prompt_length: int) -> int:
    """Return a seed that draws the same random number at position `prompt_length - 1` as `seed` at position 0.

    SGLang counts positions from the start of the sequence; the other engines count from the first new token.
    """
    return seeds.signed(seed - (prompt_length - 1) * seeds.GOLDEN)


def draw(logits_BV: torch.Tensor, info: Any, position_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the next token of each row. Returns the sampled tokens, [B], and the logp of all tokens, [B, V].

    A greedy row (temperature 0) takes the most likely token, with logp at temperature 1. Other rows draw by inverse
    transform sampling at their temperature, within top_p.

    info: SGLang's SamplingBatchInfo. Branches depend only on its host-side flags, to avoid device synchronization.
    """
    logp_BV = torch.log_softmax(logits_BV.float() / info.temperatures, -1)
    greedy_B = info.top_ks == 1
    if info.need_top_p_sampling:
        ordered, index = logp_BV.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = (before >= info.top_ps[:, None]) & ~greedy_B[:, None]
        dropped = torch.zeros_like(dropped).scatter(1, index, dropped)
        logp_BV = torch.log_softmax(logp_BV.masked_fill(dropped, -math.inf), -1)
    cumulative = logp_BV.double().exp().cumsum(-1)
    u = seeds.uniform(info.sampling_seed, position_B.long())[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, u, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    return torch.where(greedy_B, logits_BV.argmax(-1), drawn), logp_BV


def install_sampler() -> None:
    """Make SGLang draw tokens with `draw`, using the seeds of the requests.

    SGLang's seeded sampling requires --enable-deterministic-inference, which no CPU attention backend supports.
    Registering a sampling backend would not work either, because SGLang always uses `pytorch` on CPU.
    """
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def forward(self, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **_):
        logits = self._preprocess_logits(logits_output.next_token_logits, info)
        tokens, logp = draw(logits, info, positions)
        if return_logprob:
            processor = self.output_logprob_processor
            result = processor.compute_logprobs(logp, top_logprobs_nums, token_ids_logprobs, tokens)
            result.write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, info)
        return tokens.to(torch.int32)

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls, batch, vocab_size):
        info = original(cls, batch, vocab_size)
        seeds = [r.sampling_params.sampling_seed or 0 for r in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    Sampler.forward = forward
    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)
