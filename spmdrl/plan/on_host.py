"""Makes code and torch take their CPU paths while the meta device replaces a CPU."""

from typing import Any

import torch

from spmdrl.plan.numbers import META


def as_host() -> None:
    """Make the meta device look like a CPU to code that checks a tensor's device and to torch's attention."""
    torch.Tensor.is_cpu = property(lambda x: x.device.type in ("cpu", "meta"))  # type: ignore
    functional: Any = torch.nn.functional
    own = functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if q.shape[-1] != v.shape[-1] or q.device != META:
            return own(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    functional.scaled_dot_product_attention = attention
