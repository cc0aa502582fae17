"""Attention over packed batches, in which sequences are concatenated without padding.

This module registers the attention implementation `spmdrl_packed` with transformers; the forward pass hands a `Packing`
to the model as a keyword argument. By default, a layer on a GPU uses a varlen kernel (`varlen.py`) if one supports it.
Otherwise, sequences of similar length are padded to [B, H, L, d] for causal attention in torch. Padding comes after the
tokens of a sequence, so the causal mask hides it and the result is exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.config.schema import TrainingConfig
from spmdrl.hub.build import DTYPES, sees_images
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.resolve import resolve
from spmdrl.policy.attention.packing import LengthClass, Packing
from spmdrl.policy.attention.varlen import KERNELS, attend, installed, needs_of, needs_of_model, pick
from spmdrl.spmd.devices import kind_of

NAME = "spmdrl_packed"


def _hidden(group: LengthClass, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask, bool [B or 1, 1, L, P + L], that is True for keys that a query must not attend to.

    These are future keys, keys outside of a sliding window of `window` keys, and padding before a node's ancestors.
    """
    queries = group.trunk + torch.arange(group.longest, device=device)
    keys = torch.arange(group.trunk + group.longest, device=device)
    distance = queries[:, None] - keys[None, :]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    hidden = hidden[None, None]
    if group.trunks is not None:
        hidden = hidden | (keys < (group.trunk - group.trunks)[:, None])[:, None, None]
    return hidden


def _visible(group: LengthClass, q: torch.Tensor, window: int | None, sink: int) -> torch.Tensor:
    """Return the SDPA mask for nodes with ancestors or an attention sink. sink: 1 if the first key is a sink."""
    # On GPUs, SDPA kernels support causal masks aligned to the last key (bottom-right), except in float64.
    if q.device.type == "cuda" and q.dtype != torch.float64 and group.trunks is None and not window:
        # The mask is a Tensor subclass that cannot be created inside a dispatch mode, which `--run.lockstep-debug`
        # installs.
        with _disable_current_modes():
            return causal_lower_right(group.longest, sink + group.trunk + group.longest)
    return F.pad(~_hidden(group, window, q.device), (sink, 0), value=True)


def _with_sink(q, k, v, sinks_H: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Add an attention sink to queries, keys and values: a key whose score is the head's sink and whose value is 0.

    Keys and values become [T + 1, ...]. An extra query channel holds the sink score divided by `scale`. In this
    channel, the sink key is 1 and all other keys are 0, so any kernel computes the correct scores.
    """
    # Fused GPU kernels require a multiple of 8 channels.
    d, more = k.shape[2], 8 - k.shape[2] % 8
    score = (sinks_H / scale).to(q.dtype)[:, None].expand(*q.shape[:2], 1)
    q = F.pad(torch.cat([q, score], -1), (0, more - 1))
    key = F.pad(k.new_ones(1, k.shape[1], 1), (d, more - 1))
    return q, torch.cat([F.pad(k, (0, more)), key]), torch.cat([v, v.new_zeros(1, *v.shape[1:])])


def plain_attention(q, k, v, hidden: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Compute softmax attention, [B, H, L, d]. hidden: True for keys to mask out. softcap: cap on scores (Gemma 2)."""
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # As in HF models, compute the softmax in float32 (float64 for float64 inputs).
    upcast = torch.float64 if q.dtype == torch.float64 else torch.float32
    return scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=upcast).to(q.dtype) @ v


def _padded_class(
    q, k, v, group: LengthClass, kind: str, scale: float, window: int | None, softcap: float | None, sink: int
):
    """Compute attention for the tokens of one length class: [T, H, d] -> [tokens in the class, H, d].

    sink: 1 if the last key is an attention sink that every query attends to, else 0.
    """
    keys = group.keys
    if sink:
        keys = F.pad(keys.view(group.sequences, -1), (1, 0), value=len(k) - 1).flatten()
    rows = (q, group.gather), (k, keys), (v, keys)
    q, k, v = (x.index_select(0, at).view(group.sequences, -1, *x.shape[1:]).transpose(1, 2) for x, at in rows)
    if window is not None and window >= group.trunk + group.longest:
        window = None
    # On CPU in bfloat16, torch's fused backward takes 3 to 6 times as long as that of `plain_attention` at 40 to 256
    # tokens, so plain attention is used up to 512 tokens.
    on_cpu = kind_of(q.device) == "cpu"
    masked = softcap or (window and not sink)
    plain = kind == "eager" or masked or (on_cpu and q.dtype == torch.bfloat16 and group.longest <= 512)
    # On CPU, keys and values of grouped heads are not repeated, which makes torch's fused attention 20 % faster.
    repeat = q.shape[1] // k.shape[1]
    grouped = repeat > 1 and on_cpu and not plain
    if repeat > 1 and not grouped:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if plain:
        hidden = F.pad(_hidden(group, window, q.device), (sink, 0), value=False)
        out = plain_attention(q, k, v, hidden, scale, softcap)
    else:
        seen = _visible(group, q, window, sink) if group.trunk or sink else None
        causal = seen is None
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, group.scatter)


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    packing: Packing | None = None,
    s_aux=None,
    **_,
):
    """Compute attention over a packed batch, with HF's interface: query [1, H, S, d], key and value [1, H_kv, S, d].

    S is the number of tokens in this rank's slice, which is the whole packed batch without sequence parallelism. s_aux:
    attention sink score of each head, [H] (gpt-oss). Returns ([1, S, H, d], None).

    Raises:
        ValueError: the model does not forward keyword arguments to its attention, or uses bidirectional layers, dropout
            in training, or an attention mask.
    """
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} gets no packing: the family does not pass keyword arguments to its attention"
        )
    if not getattr(module, "is_causal", True) or (dropout and module.training):
        raise ValueError(f"{type(module).__name__}: packed attention supports only causal layers without dropout")
    if attention_mask is not None:
        # transformers creates no mask for this implementation, so the model built this mask itself, and it is not
        # purely causal.
        raise ValueError(f"{type(module).__name__} passes an attention mask, which packed attention does not support")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = packing.part.to_heads(*(x[0].transpose(0, 1) for x in (query, key, value)))
    sinks = None if s_aux is None else packing.part.my_heads(s_aux)
    out = _attend(q, k, v, packing, scale, sliding_window, softcap, sinks)
    return packing.part.to_tokens(out)[None], None


def _attend(
    q, k, v, packing: Packing, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention within each sequence: [T, H, e]. sinks: `s_aux` of `packed_attention` for these H heads."""
    sink = int(sinks is not None)
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks, scale)
    needs = replace(needs_of(q, v, softcap), sink_and_window=bool(sink and window))
    kind = pick(packing.kind, needs, installed())
    if kind in KERNELS:
        return attend(kind, q, k, v, packing.runs_with_sink if sink else packing.runs, scale, window, softcap)
    parts = [_padded_class(q, k, v, c, kind, scale, window, softcap, sink) for c in packing.classes]
    return torch.cat(parts).index_select(0, packing.order)


def check_attention(cfg: TrainingConfig, device: torch.device) -> None:
    """Raise ValueError if the kernel in `--policy.attention` does not support the model, without building the model."""
    if cfg.policy.attention not in KERNELS:
        return
    from transformers import AutoConfig

    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    with plain_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.model.trust_remote_code)
    pick(cfg.policy.attention, needs_of_model(config, DTYPES[cfg.model.dtype], device), installed())


ENTRIES: list[Any] = [packed_attention]
"""`packed_attention`, and after `leave_uncompiled` also the version that compiled layers can call."""


def register() -> str:
    """Register this attention implementation with transformers and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ENTRIES[-1])
    return NAME


def leave_uncompiled() -> None:
    """Exclude this attention from `torch.compile`, which would recompile it for every set of sequence lengths."""
    if len(ENTRIES) == 1:
        ENTRIES.append(torch.compiler.disable(packed_attention))
    register()


def own_attention(hf: Any) -> str:
    """Return transformers' default attention implementation for a model: sdpa if the model supports it."""
    return hf.get_correct_attn_implementation(None)


def use_attention(hf: Any, name: str) -> None:
    """Set the attention implementation of all layers except those of a vision tower, from the next forward pass on."""
    for config in _configs(hf):
        # A dict leaves the configs inside this one, such as that of a vision tower, as they are.
        config._attn_implementation = {"": name}


@contextmanager
def with_attention(hf: Any, name: str) -> Iterator[None]:
    """Use the attention implementation `name` inside this context, in the layers that `use_attention` sets."""
    before = [(config, config._attn_implementation) for config in _configs(hf)]
    use_attention(hf, name)
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = {"": own}


def _configs(hf: Any) -> list[Any]:
    known = {id(config): config for m in hf.modules() if (config := getattr(m, "config", None)) is not None}
    tower = getattr(hf.config, "vision_config", None) if sees_images(hf.config) else None
    return [config for config in known.values() if hasattr(config, "_attn_implementation") and config is not tower]
