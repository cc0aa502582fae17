"""Attention over packed sequences without padding outside of attention itself.

Registered with transformers as the attention implementation `spmdrl_packed`; a forward passes a `Packing` with the
model's keyword arguments. On GPU flash-attn's varlen kernel is used where it is installed; elsewhere sequences of
like length are laid out as [B, H, L, d] and go through causal scaled-dot-product attention. Padding stands to the
right, so causality alone keeps it out of every real row: no mask, and the result is exact.
"""

import importlib.util
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F

from spmdrl.data.tree import Tree
from spmdrl.policy.ulysses import TokenSlice

NAME = "spmdrl_packed"


@dataclass
class LengthClass:
    """Sequences of like length, or branches of like length on trunks: where their tokens stand in the pack."""

    gather: torch.Tensor
    """int64 [B * L]: token of each padded slot (padding repeats the first token)."""
    scatter: torch.Tensor
    """int64 [tokens]: padded slot of each token."""
    tokens: torch.Tensor
    """int64 [tokens]: place of each token in the pack."""
    sequences: int
    longest: int
    trunk: int = 0
    """Longest trunk, P; 0 for whole sequences."""
    keys: torch.Tensor | None = None
    """int64 [B * (P + L)]: token of each slot of a branch's keys, its trunk's first and aligned to the right."""
    trunks: torch.Tensor | None = None
    """int64 [B]: length of each trunk; None where all are P."""


@dataclass
class Packing:
    """How one packed row [T] divides into sequences; computed once a forward, used by every layer."""

    ends_q: torch.Tensor
    """int32: where each sequence (or trunk, or branch) begins, and the end, as flash-attn takes it."""
    longest_q: int
    ends_k: torch.Tensor
    """The same of its keys, which for a branch are its trunk's and its own."""
    longest_k: int
    key_rows: torch.Tensor | None
    """int64: rows of the keys, end to end; None where they are the queries' own."""
    classes: list[LengthClass]
    order: torch.Tensor
    """int64 [T]: place of each packed token in the classes' outputs laid end to end."""
    kind: str
    part: TokenSlice
    """Which of the tokens this rank's layers hold; attention itself sees all of them."""
    experts: torch.Tensor | None = None
    """[S, L, K] of those tokens: the experts that routers must choose (`routing.py`)."""


def plan_packing(
    lengths_B: torch.Tensor, device: torch.device, kind: str = "auto", group: dist.ProcessGroup | None = None
) -> Packing:
    """Sort sequences of int64 lengths [B] (on the host) into classes whose padding is at most half.

    group: ranks over which the tokens are divided (`ulysses.py`); None for whole packs.
    """
    kind, lengths = pick_kind(kind, device), lengths_B.tolist()
    classes = [] if kind == "flash" else _whole_classes(lengths, 0, device)
    ends = _ends(lengths, device)
    return Packing(
        ends, max(lengths), ends, max(lengths), None, classes, _order(classes), kind, TokenSlice(sum(lengths), group)
    )


def plan_tree_packing(
    tree: Tree, device: torch.device, kind: str = "auto", group: dist.ProcessGroup | None = None
) -> Packing:
    """The same for a tree (`tree.py`): trunks are sequences, and a branch sees its trunk and itself."""
    kind = pick_kind(kind, device)
    trunks, branches = tree.trunk_lengths, tree.branch_lengths
    trunk_starts, base = _starts(trunks), sum(trunks)
    sizes = [trunks[g] for g in tree.trunk_of]
    first = [trunk_starts[g] for g in tree.trunk_of]
    starts = [base + s for s in _starts(branches)]
    classes: list[LengthClass] = []
    key_rows = None
    if kind == "flash":
        parts = [torch.arange(base)]
        for trunk, size, start, n in zip(first, sizes, starts, branches, strict=True):
            parts += [torch.arange(trunk, trunk + size), torch.arange(start, start + n)]
        key_rows = torch.cat(parts).to(device)
    else:
        classes = _whole_classes(trunks, 0, device) + _branch_classes(first, sizes, starts, branches, device)
    queries = trunks + branches
    keys = trunks + [size + n for size, n in zip(sizes, branches, strict=True)]
    return Packing(
        _ends(queries, device),
        max(queries),
        _ends(keys, device),
        max(keys),
        key_rows,
        classes,
        _order(classes),
        kind,
        TokenSlice(sum(queries), group),
    )


def _starts(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _order(classes: list[LengthClass]) -> torch.Tensor:
    return torch.argsort(torch.cat([c.tokens for c in classes])) if classes else torch.zeros(0, dtype=torch.int64)


def _alike(lengths: list[int]) -> list[list[int]]:
    """Indices in groups: batches of nearly equal lengths stay one, very uneven ones are split by powers of two."""
    uneven = sum(lengths) * 2 < max(lengths) * len(lengths)
    groups: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        groups.setdefault(n.bit_length() if uneven else 0, []).append(i)
    return list(groups.values())


def _padded(starts: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(token of each slot [B, L], which slots are real bool [B, L], L)."""
    width = max(lengths)
    begin, size = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    slot = torch.arange(width)[None]
    real = slot < size
    return torch.where(real, begin + slot, begin), real, width


def _whole_classes(lengths: list[int], first: int, device: torch.device) -> list[LengthClass]:
    """Classes of sequences that stand end to end from token `first`."""
    starts = [first + s for s in _starts(lengths)]
    out = []
    for members in _alike(lengths):
        gather, real, width = _padded([starts[i] for i in members], [lengths[i] for i in members])
        scatter = torch.nonzero(real.flatten()).flatten().to(device)
        out.append(LengthClass(gather.flatten().to(device), scatter, gather[real].to(device), len(members), width))
    return out


def _branch_classes(
    trunk_starts: list[int], trunks: list[int], starts: list[int], lengths: list[int], device: torch.device
) -> list[LengthClass]:
    """Classes of branches: for each its trunk's first token and length, its own first token and length."""
    out = []
    for alike in _alike(lengths):
        for same in _alike([trunks[i] for i in alike]):
            members = [alike[i] for i in same]
            gather, real, width = _padded([starts[i] for i in members], [lengths[i] for i in members])
            sizes = torch.tensor([trunks[i] for i in members])
            trunk = int(sizes.max())
            # Slot j of the trunk, counted from the right, so that its last token stands before every branch.
            back = torch.arange(trunk)[None] - (trunk - sizes[:, None])
            keys = torch.cat([torch.tensor([trunk_starts[i] for i in members])[:, None] + back.clamp(min=0), gather], 1)
            out.append(
                LengthClass(
                    gather.flatten().to(device),
                    torch.nonzero(real.flatten()).flatten().to(device),
                    gather[real].to(device),
                    len(members),
                    width,
                    trunk,
                    keys.flatten().to(device),
                    None if bool((sizes == trunk).all()) else sizes.to(device),
                )
            )
    return out


def pick_kind(kind: str, device: torch.device) -> str:
    """`auto` becomes flash where flash-attn is installed and the device is a GPU, else padded."""
    if kind == "auto":
        return "flash" if device.type == "cuda" and importlib.util.find_spec("flash_attn") else "padded"
    if kind == "flash" and not importlib.util.find_spec("flash_attn"):
        raise ValueError("--policy.attention flash: flash-attn is not installed; use --policy.attention auto")
    return kind


def _hidden(group: LengthClass, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [B or 1, 1, L, P + L]: which keys a query does not see, by distance, by window, and beyond short trunks."""
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


def _plain_attention(q, k, v, hidden: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Softmax attention [B, H, L, d] with hidden keys and score soft-capping, as Gemma 2 needs."""
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # In float32 as HF does it; float64 stays.
    upcast = torch.float64 if q.dtype == torch.float64 else torch.float32
    return scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=upcast).to(q.dtype) @ v


def _padded_class(q, k, v, group: LengthClass, kind: str, scale: float, window: int | None, softcap: float | None):
    """One class: [T, H, d] -> [its tokens, H, d]."""

    def lay_out(x, rows):
        return x.index_select(0, rows).view(group.sequences, -1, *x.shape[1:]).transpose(1, 2)

    keys = group.gather if group.keys is None else group.keys
    q, k, v = lay_out(q, group.gather), lay_out(k, keys), lay_out(v, keys)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if window is not None and window >= group.trunk + group.longest:
        window = None
    # torch's fused backward in bfloat16 on a CPU takes 3 to 6 times as long as the plain form (40 to 256 tokens).
    slow_fused = q.device.type == "cpu" and q.dtype == torch.bfloat16 and group.longest <= 512
    if kind == "eager" or softcap or window or slow_fused:
        out = _plain_attention(q, k, v, _hidden(group, window, q.device), scale, softcap)
    elif group.trunk:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~_hidden(group, None, q.device), scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
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
    """HF attention interface over one packed row. query [1, H, S, d], key and value [1, H_kv, S, d].

    S are the tokens of this rank's slice: all T of them without sequence parallelism. Returns ([1, S, H, d], None).

    Raises:
        ValueError: a model that does not hand keyword arguments to its attention, or one with dropout, attention sinks
            or a bidirectional layer.
    """
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} gets no packing: this architecture does not pass keyword arguments "
            "to its attention and cannot train packed; report the model's config.json"
        )
    if not getattr(module, "is_causal", True) or (dropout and module.training):
        raise ValueError(f"{type(module).__name__}: packed attention is causal and without dropout")
    if s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed attention has no attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = packing.part.to_heads(*(x[0].transpose(0, 1) for x in (query, key, value)))
    out = _attend(q, k, v, packing, scale, sliding_window, softcap)
    return packing.part.to_tokens(out)[None], None


def _attend(q, k, v, packing: Packing, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """Attention inside each sequence: [T, H, d]."""
    if packing.kind == "flash":
        from flash_attn import flash_attn_varlen_func

        if packing.key_rows is not None:
            k, v = k.index_select(0, packing.key_rows), v.index_select(0, packing.key_rows)
        # Causal by distance from the end, which is what a branch with more keys than queries needs.
        return flash_attn_varlen_func(
            q,
            k,
            v,
            packing.ends_q,
            packing.ends_k,
            packing.longest_q,
            packing.longest_k,
            softmax_scale=scale,
            causal=True,
            softcap=softcap or 0.0,
            window_size=(window - 1, 0) if window else (-1, -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    parts = [_padded_class(q, k, v, c, packing.kind, scale, window, softcap) for c in packing.classes]
    return torch.cat(parts).index_select(0, packing.order)


def register() -> str:
    """Make the implementation known to transformers; returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME
