"""Shards packed sequences over context-parallel ranks, and implements attention without TransformerEngine.

With context parallelism over cp ranks, every sequence is padded to a multiple of 2 cp tokens and split into 2 cp
chunks. Rank r gets the r-th chunk and the r-th chunk from the end, which balances the cost of causal attention.
TransformerEngine and Megatron's rotary embedding use the same split.

Shapes: T packed tokens, S tokens on one rank (with padding), n heads, g key-value heads, d head dimension.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from spmdrl.data.batch import Batch
from spmdrl.policy.attention.packed import plain_attention
from spmdrl.policy.attention.varlen import KERNELS, Runs, installed, make_runs, needs_of, pick
from spmdrl.policy.attention.varlen import attend as attend_runs
from spmdrl.policy.forward_plan import HeadRows, kept_plan
from spmdrl.policy.megatron.layout import Layout
from spmdrl.spmd.copies import to_device


@dataclass
class Params(PackedSeqParams):
    """Packed-sequence parameters that Megatron's layers receive."""

    routing: Any = None
    """Information for the routers (`routing.Routing`), or None for a dense model."""
    lengths: tuple[int, ...] = ()
    """Padded sequence lengths, in host memory. Reading them from the GPU would synchronise in each layer."""
    order: torch.Tensor | None = None
    """int64: index of each row of the packed batch within the rows gathered from all ranks, or None without context
    parallelism."""
    runs: Runs | None = None
    """Result of `runs_of` on the device, computed by the first layer that needs it; None until then."""


@dataclass
class Pack:
    """One rank's input to a GPTModel: `model(pack.tokens, pack.positions, None, packed_seq_params=pack.params)`."""

    tokens: torch.Tensor
    """Token ids, int64 [1, S]; 0 for padding."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 [1, S]."""
    params: Params
    rows: torch.Tensor
    """int64 [S]: index of each token among the T packed tokens; -1 for padding."""
    head: HeadRows
    """The tokens in the loss mask that this rank's head processes."""


def make_packs(batches: list[Batch], layout: Layout, cp_rank: int, before: bool) -> list[Pack]:
    """Return this rank's packed micro-batches for one pass through the pipeline, in host memory.

    The arguments are as in `make_pack`. Packs are cached in their batch for later passes.
    """
    # With virtual stages, all packs must have the same length. Otherwise, Megatron's stages would first exchange the
    # lengths, and two stages of the interleaved schedule could deadlock in that exchange.
    size = 0
    if layout.virtual_stages > 1 and batches:
        size = max(sum(_padded(batch.lengths.tolist(), layout)) for batch in batches)

    def pack(batch: Batch) -> Pack:
        return kept_plan(
            batch, (layout, cp_rank, before, size), lambda: make_pack(batch, layout, cp_rank, before, size)
        )

    return [pack(batch) for batch in batches]


def make_pack(batch: Batch, layout: Layout, cp_rank: int, before: bool, size: int = 0) -> Pack:
    """Return this rank's part of a packed batch, or the whole batch without context parallelism.

    Sequences are padded on the right, where causal attention hides the padding. before: True if the head reads the
    hidden state that predicts a token instead of the hidden state at the token. size: total number of tokens to pad to
    over all ranks, or 0 for the minimum that the layout requires.
    """
    tokens_T, mask_T, lengths = batch.token["tokens"], batch.token["mask"], batch.lengths.tolist()
    padded = _padded(lengths, layout)
    if sum(padded) < size:
        lengths, padded = [*lengths, 0], [*padded, size - sum(padded)]
    rows, positions, first = [], [], 0
    for n, m in zip(lengths, padded, strict=True):
        place = torch.arange(m)
        rows.append(torch.where(place < n, place + first, -1))
        positions.append(place)
        first += n
    mine = rows_of(padded, layout.cp, cp_rank)
    rows_S = torch.cat(rows)[mine]
    tokens_S = torch.where(rows_S >= 0, tokens_T[rows_S.clamp(min=0)], 0)
    # of_S maps each state to a token: the next token, which the state predicts, or the token at the state.
    of_S = torch.where(rows_S < 0, -1, rows_S + int(before))
    inside = (of_S >= 0) & (of_S < len(mask_T))
    at = torch.nonzero(inside & mask_T[of_S.clamp(0, len(mask_T) - 1)]).flatten()
    head = HeadRows(of_S[at], at, tokens_T[of_S[at]])
    cu = torch.tensor([0, *padded]).cumsum(0).to(torch.int32)
    order = torch.cat([rows_of(padded, layout.cp, rank) for rank in range(layout.cp)]).argsort()
    params = Params(
        "thd", cu, cu, cu, cu, max(padded), max(padded), lengths=tuple(padded), order=order if layout.cp > 1 else None
    )
    return Pack(tokens_S[None], torch.cat(positions)[mine][None], params, rows_S, head)


def pack_on_device(pack: Pack, device: torch.device) -> Pack:
    """Return a copy of the packed batch with all tensors moved to `device`."""
    pack = to_device(pack, device)
    # `repairs.py` reads this attribute. Megatron's rotary embedding only receives this tensor of the packed batch.
    setattr(pack.params.cu_seqlens_q, "positions", pack.positions[0])  # noqa: B010
    return pack


def _padded(lengths: list[int], layout: Layout) -> list[int]:
    step = 2 * layout.cp if layout.cp > 1 else 1
    padded = [-(-n // step) * step for n in lengths]
    # Pad the last sequence further, because sequence parallelism splits a rank's tokens into tp equal parts.
    padded[-1] += -sum(padded) % lcm(step, layout.cp * (layout.tp if layout.sp else 1))
    return padded


def rows_of(padded: list[int], cp: int, rank: int) -> torch.Tensor:
    """Return the indices, int64 [S], of a rank's rows in the padded batch. padded: lengths, multiples of 2 cp."""
    if cp == 1:
        return torch.arange(sum(padded))
    out, first = [], 0
    for n in padded:
        chunk = n // (2 * cp)
        for part in (rank, 2 * cp - 1 - rank):
            out.append(torch.arange(first + part * chunk, first + (part + 1) * chunk))
        first += n
    return torch.cat(out)


def runs_of(lengths: list[int], cp: int, rank: int) -> Runs:
    """Return the `Runs` of a rank's queries over all keys, for the kernels in `attention/varlen.py`.

    lengths: padded sequence lengths, as in `rows_of`. With cp > 1, every chunk is treated as a sequence whose keys are
    those of the chunk and of all previous chunks in the original sequence.
    """
    if cp == 1:
        return make_runs(lengths)
    queries, keys = [], []
    for first, n in zip(accumulate([0, *lengths]), lengths, strict=False):
        chunk = n // (2 * cp)
        queries += [chunk, chunk]
        keys += [[(first, (part + 1) * chunk)] for part in (rank, 2 * cp - 1 - rank)]
    return make_runs(queries, keys)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Compute attention for one sequence: queries [s, n, d], keys [t, g, d], values [t, g, e] -> [s, n, e].

    visible: bool [s, t], True for keys that a query attends to, or None for causal attention with s = t. softcap: cap
    on scores, as softcap * tanh(scores / softcap), or None for no cap.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        causal = visible is None
        out = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return plain_attention(q, k, v, ~visible, scale, softcap)[0].transpose(0, 1)


class CoreAttention(MegatronModule):
    """Attention over packed sequences without TransformerEngine, using the kernels in `attention/varlen.py` if
    possible.

    It supports grouped-query attention, latent attention (different key and value dimensions), sliding windows and
    softcapping. With context parallelism, it all-gathers keys and values.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        softcap: float | None = None,
        **unused: Any,
    ):
        """softcap: as in `attend`. Megatron passes the other arguments to every core attention."""
        super().__init__(config=config)
        self.scale, self.softcap = softmax_scale, softcap
        self.cp_group = pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else None

    def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, **unused):
        """Compute attention: [S, n, d], [S, g, d], [S, g, e] -> [S, n * e]."""
        if packed_seq_params is None:
            raise ValueError("spmdrl's attention for Megatron needs packed sequences: pass packed_seq_params")
        lengths = list(packed_seq_params.lengths)
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp > 1:
            # The backward of this gather reduces the gradients of keys and values over ranks.
            order = packed_seq_params.order
            key, value = (gather_from_sequence_parallel_region(x, True, self.cp_group)[order] for x in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        kernel = pick("auto", needs_of(query, value, self.softcap), installed())
        if kernel in KERNELS:
            # Megatron's window size excludes the query's own token; the kernels' window size includes it.
            window = None if self.window is None else self.window + 1
            if packed_seq_params.runs is None:
                packed_seq_params.runs = to_device(runs_of(lengths, cp, rank), key.device)
            runs = packed_seq_params.runs
            return attend_runs(kernel, query, key, value, runs, scale, window, self.softcap).flatten(1)
        rows = to_device(rows_of(lengths, cp, rank), key.device)
        out, done = [], 0
        for first, n in zip(accumulate([0, *lengths]), lengths, strict=False):
            mine = slice(done, done + n // cp)
            visible = None
            if cp > 1 or (self.window is not None and self.window + 1 < n):
                ahead = (rows[mine] - first)[:, None] - torch.arange(n, device=key.device)
                visible = ahead >= 0
                if self.window is not None:
                    visible &= ahead <= self.window
            k, v = key[first : first + n], value[first : first + n]
            out.append(attend(query[mine], k, v, visible, scale, self.softcap))
            done += n // cp
        return torch.cat(out).flatten(1)
