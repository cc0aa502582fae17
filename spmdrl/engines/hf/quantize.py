"""8-bit weights for the HF engine: a linear layer with one scale per output, rounded to nearest.

Quantizes only weights, as in https://arxiv.org/abs/2208.07339 without its outliers (int8), or in E4M3
(https://arxiv.org/abs/2209.05433). Samples then come from other weights than the trainer's, so use it with the rollout
correction.
"""

from typing import Any

import torch
from torch import nn

FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Format -> torch type, and the largest magnitude in use."""


class QuantizedLinear(nn.Module):
    """Computes y = (x Q^T) s + b with 8-bit Q [out, in] and float32 s [out]."""

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, kind: str):
        """Quantize a layer's weights, if it has any values. kind: `int8` or `fp8`."""
        super().__init__()
        self.kind = kind
        dtype = FORMATS[kind][0]
        weight = linear.weight
        # A parameter, so that its memory is moved and counted with that of the others.
        self.weight = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=weight.device), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(len(weight), 1, device=weight.device), requires_grad=False)
        self.bias = linear.bias
        if not weight.is_meta:
            self.take(weight.detach())

    @torch.no_grad()
    def take(self, weight: torch.Tensor) -> None:
        """Replace the weights by the quantized `weight`, [out, in] in any floating type."""
        dtype, most = FORMATS[self.kind]
        weight = weight.float()
        self.scale.copy_((weight.abs().amax(1, keepdim=True) / most).clamp_min(1e-12))
        scaled = weight / self.scale
        self.weight.copy_((scaled.round() if dtype == torch.int8 else scaled).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale[:, 0].to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantize(model: Any, kind: str) -> dict[str, QuantizedLinear]:
    """Quantize the linear layers of a HF model's blocks (not its head); return them by the name of their weight."""
    out, prefix = {}, f"{model.base_model_prefix}."
    for name, module in list(model.base_model.named_modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                quantized = QuantizedLinear(linear, kind)
                setattr(module, child, quantized)
                out[f"{prefix}{name + '.' if name else ''}{child}.weight"] = quantized
    return out
