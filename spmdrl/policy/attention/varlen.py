"""Kernels for causal attention over concatenated sequences, and kernel selection per layer.

`flash` is flash-attn's varlen kernel; `varlen` is torch's own, which needs no extra package. In both, the last query of
a sequence attends to all of its keys, even if there are fewer queries than keys. Queries that follow a shared prefix,
or that form a chunk in the middle of a sequence, therefore need no mask. Only their keys must be gathered, at a cost
linear in the number of tokens.

Shapes: Q query rows, N key rows, H query heads, K key-value heads, d and e head dimensions of keys and values.
"""

import inspect
import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from spmdrl.config.fields import ConfigError

log = logging.getLogger("spmdrl")

KERNELS = ("flash", "varlen")
"""Kernel names in order of preference; only `flash` supports softcapping."""
WIDEST = 256


@dataclass(frozen=True)
class Needs:
    """Properties of a layer that determine which kernels support it."""

    capability: int
    """Major compute capability of the GPU; 0 for other devices."""
    dtype: torch.dtype
    width: int
    """Head dimension. If keys and values differ, it is the larger of the two."""
    softcap: bool = False
    sink_and_window: bool = False
    """True if the layer has both an attention sink and a sliding window."""


@dataclass
class Runs:
    """Query and key rows of each sequence, in the kernels' format."""

    ends_q: torch.Tensor
    """int32 [sequences + 1]: cumulative query lengths, like `cu_seqlens_q` in flash-attn."""
    longest_q: int
    ends_k: torch.Tensor
    """int32 [sequences + 1]: cumulative key lengths; each sequence has at least as many keys as queries."""
    longest_k: int
    key_rows: torch.Tensor | None
    """int64 [N]: key rows to gather for all sequences, or None if keys and queries have the same rows."""


def make_runs(queries: list[int], keys: list[list[tuple[int, int]]] | None = None) -> Runs:
    """Build the `Runs` for sequences with the given numbers of queries, in host memory.

    keys: key spans (first row, number of rows) of each sequence, or None if keys have the same rows as queries.
    """
    if keys is None:
        ends, longest = _ends(queries), max(queries)
        return Runs(ends, longest, ends, longest, None)
    lengths = [sum(n for _, n in spans) for spans in keys]
    rows = torch.cat([torch.arange(first, first + n) for spans in keys for first, n in spans])
    return Runs(_ends(queries), max(queries), _ends(lengths), max(lengths), rows)


def _ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@cache
def installed() -> frozenset[str]:
    """Return the kernels that this process can call on a GPU."""
    found = {"flash"} if _flash_loads() else set()
    # Some builds of torch lack the kernel. ROCm has a different kernel, which this project has not tested.
    if torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None:
        found.add("varlen")
    return frozenset(found)


def _flash_loads() -> bool:
    """Return True if flash-attn can be imported; log a warning if it is installed but fails to import."""
    if not find_spec("flash_attn"):
        return False
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # A build for another torch version may raise errors other than ImportError.
        log.warning(f"flash-attn is installed but cannot be imported: {type(error).__name__}: {error}")
        return False
    return True


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def needs_of(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> Needs:
    """Return the `Needs` of a layer with the given queries [..., d] and values [..., e]."""
    return Needs(_capability(q.device), q.dtype, max(q.shape[-1], v.shape[-1]), bool(softcap))


def needs_of_model(config: Any, dtype: torch.dtype, device: torch.device) -> Needs:
    """Return the `Needs` of a model from its HF config, without `sink_and_window`.

    dtype: dtype of the forward pass.
    """
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # In latent attention, only a part of each key has rotary embeddings; add up the dimensions of both parts.
    width = max(width, getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0))
    return Needs(_capability(device), dtype, width, bool(getattr(text, "attn_logit_softcapping", None)))


def lacking(kernel: str, needs: Needs, there: frozenset[str]) -> str:
    """Return why a kernel does not support a layer, or "" if it does. there: installed kernels (`installed`)."""
    if needs.capability < 8:
        return "it needs an NVIDIA GPU of the Ampere generation or later"
    if kernel not in there:
        return "flash-attn is not installed" if kernel == "flash" else "this build of torch lacks that kernel"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {str(needs.dtype).removeprefix('torch.')}"
    if needs.width > WIDEST:
        return f"it takes heads of up to {WIDEST} channels, not {needs.width}"
    if needs.softcap and kernel == "varlen":
        return "it does not support the model's soft-capped attention scores"
    if needs.sink_and_window:
        return "its window would hide the attention sink, which this model has"
    return ""


def pick(kind: str, needs: Needs, there: frozenset[str]) -> str:
    """Choose an implementation for a layer: a kernel in `KERNELS`, `padded` or `eager`. kind: `--policy.attention`.

    Raises:
        ConfigError: the kernel in the settings does not support the layer.
    """
    if kind == "auto":
        return next((kernel for kernel in KERNELS if not lacking(kernel, needs, there)), "padded")
    why = lacking(kind, needs, there) if kind in KERNELS else ""
    if why:
        raise ConfigError(f"--policy.attention {kind}: {why}; use --policy.attention auto")
    return kind


def attend(
    kernel: str,
    q_QHd: torch.Tensor,
    k_NKd: torch.Tensor,
    v_NKe: torch.Tensor,
    runs: Runs,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence of `runs`: [Q, H, e].

    window: number of keys that a query attends to, including its own token's key; None for full causal attention.
    """
    if runs.key_rows is not None:
        k_NKd, v_NKe = k_NKd.index_select(0, runs.key_rows), v_NKe.index_select(0, runs.key_rows)
    width, e = max(q_QHd.shape[-1], v_NKe.shape[-1]), v_NKe.shape[-1]
    q, k, v = (_fit(x, -(-width // 8) * 8) for x in (q_QHd, k_NKd, v_NKe))
    pack = (q, k, v, runs.ends_q, runs.ends_k, runs.longest_q, runs.longest_k)
    sizes = (window - 1 if window else -1, 0)
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        same = torch.are_deterministic_algorithms_enabled()
        more = dict(softmax_scale=scale, causal=True, window_size=sizes, softcap=softcap or 0.0, deterministic=same)
        out: Any = flash_attn_varlen_func(*pack, **more)
    else:
        from torch.nn.attention.varlen import varlen_attn

        # The window argument makes the kernel causal. Versions of torch without `enable_gqa` support grouped heads by
        # default.
        known = inspect.signature(varlen_attn).parameters
        grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
        out: Any = varlen_attn(*pack, scale=scale, window_size=sizes, **grouped)
    return out[..., :e]


def _fit(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zero-pad the head dimension to `width`, which kernels support, and make the tensor contiguous."""
    x = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()
