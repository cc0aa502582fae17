"""Draws tokens like the HF engine, from seeds that depend on data (law 3)."""

import math
from typing import Any

import torch

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants, as in `spmd/seeds.py`."""


def signed(x: int) -> int:
    """Return the lowest 64 bits of x as a signed integer."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def uniform(seeds_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Twin of `spmd.seeds.uniform`: one float64 in (0, 1) per row, from its own int64 seed and position."""

    def shift(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seeds_B + (position_B + 1) * signed(GOLDEN)
    x = (x ^ shift(x, 30)) * signed(MIX1)
    x = (x ^ shift(x, 27)) * signed(MIX2)
    x = x ^ shift(x, 31)
    return (shift(x, 12).double() + 0.5) * 2.0**-52


def seed_at(seed: int, prompt_length: int) -> int:
    """Return the seed that gives position `prompt_length - 1` the number that `seed` gives position 0.

    SGLang counts positions from the start of the sequence, the other engines from the first new token.
    """
    return signed(seed - (prompt_length - 1) * GOLDEN)


def draw(logits_BV: torch.Tensor, info: Any, position_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token [B] with logp [B, V] at each row's temperature (1 when greedy), by inverse transform.

    info: SGLang's SamplingBatchInfo. Its host-side flags tell whether the batch needs top-p and has greedy rows, so
    nothing here waits for the device.
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
    u = uniform(info.sampling_seed, position_B.long())[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, u, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    return torch.where(greedy_B, logits_BV.argmax(-1), drawn), logp_BV


def install_sampler() -> None:
    """Make SGLang draw tokens by `draw`, with the seeds of the requests.

    Its own seeded sampling needs --enable-deterministic-inference, which no attention backend of a CPU supports, and on
    a CPU `pytorch` replaces every registered sampling backend.
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
