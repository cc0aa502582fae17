"""Divides packed sequences under context parallelism, and computes attention for Megatron without TransformerEngine.

Under context parallelism (cp ranks), every sequence is padded to a multiple of 2 cp tokens and cut into 2 cp chunks.
Rank r gets the r-th chunk and the r-th chunk from the end, so that causal attention costs the same on every rank.
TransformerEngine and Megatron's rotary embedding divide sequences the same way.

Shapes: T tokens of a pack, S of them (with padding) on one rank, n heads, g key-value heads, d channels of a head.
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

from spmdrl.policy.attention.packed import plain_attention
from spmdrl.policy.attention.varlen import KERNELS, Runs, installed, make_runs, needs_of, pick
from spmdrl.policy.attention.varlen import attend as attend_runs
from spmdrl.policy.megatron.layout import Layout


@dataclass
class Params(PackedSeqParams):
    """The information about a pack that Megatron's layers receive."""

    routing: Any = None
    """The information about the pack that routers need (`routing.Routing`); None for a model without experts."""
    lengths: tuple[int, ...] = ()
    """Padded lengths of the pack's sequences. They are in host memory, because reading them from the GPU would make the
    host wait for it in each layer."""
    runs: Runs | None = None
    """The result of `runs_of`, computed by the first layer that needs it; None before."""


@dataclass
class Pack:
    """One rank's input for a GPTModel: `model(pack.tokens, pack.positions, None, packed_seq_params=pack.params)`."""

    tokens: torch.Tensor
    """Token ids, int64 [1, S]; 0 for padding."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 [1, S]."""
    params: Params
    rows: torch.Tensor
    """int64 [S]: index of each token among the pack's T tokens; -1 for padding."""


Tokens = tuple[torch.Tensor, torch.Tensor]
"""Token ids of concatenated sequences, int64 [T]; lengths of the sequences, int64 [B], each at least 1."""


def make_packs(batches: list[Tokens], layout: Layout, cp_rank: int, device: Any) -> list[Pack]:
    """Return this rank's packs for the micro-batches of one pass through a pipeline, made by `make_pack`."""
    # With virtual stages, all packs must have the same length. If lengths differed, Megatron's stages would exchange
    # them first, and two stages of the interleaved schedule could deadlock in that exchange.
    size = 0
    if layout.virtual_stages > 1 and batches:
        size = max(sum(_padded(lengths.tolist(), layout)) for _, lengths in batches)
    return [make_pack(tokens, lengths, layout, cp_rank, device, size) for tokens, lengths in batches]


def make_pack(
    tokens_T: torch.Tensor, lengths_B: torch.Tensor, layout: Layout, cp_rank: int, device: Any, size: int = 0
) -> Pack:
    """Return this rank's part of a pack; without context parallelism this is the complete pack.

    tokens_T, lengths_B: as in `Tokens`. Padding is at the end of each sequence, where causal attention hides it. size:
    number of tokens, over all ranks, to which the pack is padded; 0 for no more padding than the layout needs.
    """
    lengths = lengths_B.tolist()
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
    tokens_S = torch.where(rows_S >= 0, tokens_T.cpu()[rows_S.clamp(min=0)], 0)
    cu = torch.tensor([0, *padded]).cumsum(0).to(torch.int32).to(device)
    longest = max(padded)
    params = Params("thd", cu, cu, cu, cu, longest, longest, lengths=tuple(padded))
    return Pack(tokens_S[None].to(device), torch.cat(positions)[mine][None].to(device), params, rows_S.to(device))


def _padded(lengths: list[int], layout: Layout) -> list[int]:
    step = 2 * layout.cp if layout.cp > 1 else 1
    padded = [-(-n // step) * step for n in lengths]
    # The last sequence gets further padding, because sequence parallelism cuts a rank's tokens into tp equal parts.
    padded[-1] += -sum(padded) % lcm(step, layout.cp * (layout.tp if layout.sp else 1))
    return padded


def rows_of(padded: list[int], cp: int, rank: int) -> torch.Tensor:
    """Return the indices, int64 [S], of a rank's rows in a padded pack. padded: sequence lengths, multiples of 2 cp."""
    if cp == 1:
        return torch.arange(sum(padded))
    out, first = [], 0
    for n in padded:
        chunk = n // (2 * cp)
        for part in (rank, 2 * cp - 1 - rank):
            out.append(torch.arange(first + part * chunk, first + (part + 1) * chunk))
        first += n
    return torch.cat(out)


def runs_of(lengths: list[int], cp: int, rank: int, device: torch.device) -> Runs:
    """Return the `Runs` of a rank's queries over the keys of the complete pack, for kernels in `attention/varlen.py`.

    lengths: padded lengths of the sequences, as in `rows_of`. A chunk counts as one sequence, whose keys are those of
    the chunk and of all earlier chunks.
    """
    if cp == 1:
        return make_runs(lengths, device)
    queries, keys = [], []
    for first, n in zip(accumulate([0, *lengths]), lengths, strict=False):
        chunk = n // (2 * cp)
        queries += [chunk, chunk]
        keys += [[(first, (part + 1) * chunk)] for part in (rank, 2 * cp - 1 - rank)]
    return make_runs(queries, device, keys)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Compute attention of one sequence: queries [s, n, d], keys [t, g, d], values [t, g, e] -> [s, n, e].

    visible: bool [s, t], True for keys to which a query attends; None for causal attention with s = t. softcap: scores
    become softcap * tanh(scores / softcap); None for no cap.
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
    """Attention over packed sequences without TransformerEngine, by a kernel of `attention/varlen.py` if possible.

    It supports grouped heads, latent attention (values of another width than keys), sliding windows and soft-capped
    scores. Under context parallelism it gathers the keys and values of all ranks.
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
        """softcap: as in `attend`. The other arguments are those that Megatron passes to every core attention."""
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
            # The backward of this gather sums the gradients of keys and values over ranks.
            order = torch.cat([rows_of(lengths, cp, r) for r in range(cp)]).argsort().to(key.device)
            key, value = (gather_from_sequence_parallel_region(x, True, self.cp_group)[order] for x in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        kernel = pick("auto", needs_of(query, value, self.softcap), installed())
        if kernel in KERNELS:
            # Megatron's window is the number of keys before the query's token; the window of the kernels also counts
            # the key of that token.
            window = None if self.window is None else self.window + 1
            if packed_seq_params.runs is None:
                packed_seq_params.runs = runs_of(lengths, cp, rank, key.device)
            runs = packed_seq_params.runs
            return attend_runs(kernel, query, key, value, runs, scale, window, self.softcap).flatten(1)
        rows = rows_of(lengths, cp, rank).to(key.device)
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
