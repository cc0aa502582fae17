"""Faster matmuls on some CPUs: oneDNN for float32 where MKL uses half of the vector width, float32 for slow bfloat16.

On x86, torch 2.13 multiplies float32 matrices with MKL, which uses vectors of 256 bits on an AMD CPU. If a core has
vectors of twice that width (Zen 5), oneDNN takes less than half the time: 1.2 ms instead of 2.8 ms for a product of
2104 x 128 x 512. On Zen 4 this module uses torch's products, because oneDNN gains little on that CPU: for 471 x 128 x
512, whose rows do not fill the last tile, MKL took 0.62 ms and oneDNN 0.73 ms; for 1024 x 576 x 1536 MKL took 18.6 ms
and oneDNN 17.4 ms.

oneDNN compiles a kernel of about 1 MiB for every shape and caches a thousand kernels. To bound this memory, products
are cut into tiles of a few sizes, and torch multiplies the remaining rows.

Without AVX-512, torch multiplies bfloat16 matrices by plain loops: a product of 512 x 1536 x 576 took 462 ms on one
core with AVX2, but 14 ms when the matrices were first copied to float32. Both ways round the result only once.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch

TILES = (1024, 256, 64, 32)
"""Possible numbers of rows of a tile, tried in this order."""
SUMMED = (128, 64, 32)
"""Possible numbers of rows of a tile in products that sum over rows. oneDNN adds a tile's rows one by one, so the
relative error grows with their number: 4e-7 for 1024 rows; 2e-7 for 128 rows, the same as with MKL."""
LEAST = 1 << 20
"""Smallest number of multiplications in a tile. Smaller products are faster with MKL, because its calls have less
overhead."""
WORTH_IT = 1 << 22
"""Smallest number of multiplications in a product that is cut into tiles; torch computes smaller products."""
WIDE_FAMILY = 26
"""CPU family number of AMD's first CPUs with vector units of 512 bits (Zen 5)."""


def _is_halved(about: str) -> bool:
    """Return True if MKL uses only half of this CPU's vector width. about: the text of /proc/cpuinfo."""
    family = re.search(r"^vendor_id\s*: AuthenticAMD\n(?:.+\n)*?cpu family\s*: (\d+)", about, re.MULTILINE)
    return bool(family) and int(family[1]) >= WIDE_FAMILY


_CPU = Path("/proc/cpuinfo")
HALVED = _is_halved(_CPU.read_text() if _CPU.exists() else "")
"""True if oneDNN takes about half of MKL's time on this CPU."""
AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
WIDENS = AVAILABLE and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""True if this CPU multiplies float32 copies of bfloat16 matrices faster than the matrices themselves."""


def takes(x: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Return True if this module computes x @ weight.T faster than torch does."""
    if not (x.is_cpu and x.dtype == weight_NK.dtype and AVAILABLE):
        return False
    if x.dtype == torch.bfloat16:
        # Multiplying a single row takes less time than converting the weight to float32.
        return WIDENS and x.numel() > x.shape[-1]
    return HALVED and x.dtype == torch.float32 and x.numel() * len(weight_NK) >= WORTH_IT


def widened(*matrices: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return float32 copies of the matrices, so that their product is rounded only once; None remains None."""
    return tuple(x if x is None else x.float() for x in matrices)


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, [T, N], for float32 or bfloat16 matrices on the CPU, without gradient."""
    if x_TK.dtype == torch.bfloat16:
        return linear(*widened(x_TK, weight_NK, bias_N)).to(x_TK.dtype)  # type: ignore[arg-type]
    if not HALVED:
        return torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    parts = []
    for rows, tiled in _tiles(len(x_TK), weight_NK.numel()):
        if tiled:
            parts.append(torch.ops.mkldnn._linear_pointwise(x_TK[rows], weight_NK, bias_N, "none", [], ""))
        else:
            parts.append(torch.nn.functional.linear(x_TK[rows], weight_NK, bias_N))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def outer(a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """Return a.T @ b, [M, N], for matrices as in `linear`; oneDNN sums over T tile by tile."""
    if a_TM.dtype == torch.bfloat16:
        return outer(*widened(a_TM, b_TN)).to(a_TM.dtype)  # type: ignore[arg-type]
    if not HALVED:
        return a_TM.t() @ b_TN
    total = None
    for rows, tiled in _tiles(len(a_TM), a_TM.shape[1] * b_TN.shape[1], SUMMED):
        a_MT, b_NT = a_TM[rows].t(), b_TN[rows].t()
        part = torch.ops.mkldnn._linear_pointwise(a_MT, b_NT, None, "none", [], "") if tiled else a_MT @ b_NT.t()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _tiles(length: int, others: int, sizes: tuple[int, ...] = TILES) -> Iterator[tuple[slice, bool]]:
    """Yield slices that together cover `length` rows, each with True if it is a tile and False if torch multiplies it.

    others: number of multiplications per row. sizes: possible numbers of rows of a tile.
    """
    at = 0
    for size in sizes:
        while size * others >= LEAST and length - at >= size:
            yield slice(at, at + size), True
            at += size
    if at < length or not length:
        yield slice(at, length), False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, bias_N):
        """Apply `linear` to an input [..., K], and save the input and the weight for backward."""
        ctx.save_for_backward(x, weight_NK)
        return linear(x.reshape(-1, x.shape[-1]), weight_NK, bias_N).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x, weight and bias; None for an input that needs no gradient."""
        x, weight_NK = ctx.saved_tensors
        grad_TN = grad.reshape(-1, grad.shape[-1]).contiguous()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            linear(grad_TN, weight_NK.t()).view(x.shape) if need_x else None,
            outer(grad_TN, x.reshape(-1, x.shape[-1])) if need_weight else None,
            grad_TN.sum(0) if need_bias else None,
        )


def host_linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `F.linear`, [..., K] -> [..., N], by this module's matmul if it is faster than torch's."""
    if takes(x, weight_NK):
        return _Linear.apply(x, weight_NK, bias_N)  # type: ignore[return-value]
    # torch multiplies rows that lie apart, such as the last token of each prompt, by one copy of the weight per row:
    # bfloat16 rows [48, 1, 576] by a weight [49152, 576] took 10.7 s and 2.4 GiB instead of 0.04 s.
    return torch.nn.functional.linear(x.contiguous() if x.is_cpu else x, weight_NK, bias_N)


class HostLinear(torch.nn.Linear):
    """An `nn.Linear` whose forward uses `host_linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [..., K] -> [..., N]."""
        return host_linear(input, self.weight, self.bias)


def use_host_linear(model: torch.nn.Module) -> None:
    """Turn every `nn.Linear` of a model into a `HostLinear`; parameters, names and hooks stay unchanged."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = HostLinear
