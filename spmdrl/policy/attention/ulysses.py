"""Sequence parallelism that trades heads for tokens (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

T packed tokens, R ranks of a sequence-parallel group, S = ceil(T / R) tokens per rank, H query heads, K key-value
heads, d a head's width. All ranks of the group hold the same pack; each runs the transformer on its own slice of it.
Only attention needs every token: one all-to-all before it gives each rank all T tokens of H / R heads, and one after it
restores the slices. The model's outputs are joined at the end, so losses receive whole packs.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from spmdrl.data.batch import Batch
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.rotary import limits
from spmdrl.spmd.exchange import all_reduce


class _AllToAll(torch.autograd.Function):
    """Sends block r of dim 0 to rank r. This is its own transpose, so the backward runs it again."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Total(torch.autograd.Function):
    """Sums over ranks that all compute the same loss from the sum, so each rank's gradient is already complete."""

    @staticmethod
    def forward(ctx, group, *parts):
        return tuple(x.clone() for x in all_reduce(torch.stack(parts), "sum", group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, *grads


class TokenSlice:
    """This rank's slice of a pack of T tokens: S tokens from `start`, padded if T ends earlier.

    Without a group the slice is the whole pack and nothing is communicated.
    """

    def __init__(self, tokens: int, group: dist.ProcessGroup | None = None):
        self.tokens, self.group = tokens, group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.size = -(-tokens // self.ranks)
        self.start = 0 if group is None else dist.get_group_rank(group, dist.get_rank()) * self.size

    def mine(self, x_T: torch.Tensor) -> torch.Tensor:
        """Cut this rank's slice out of a tensor: [T, ...] -> [S, ...], zeros on padding."""
        part = x_T[self.start : self.start + self.size]
        return F.pad(part, (0, 0) * (part.dim() - 1) + (0, self.size - len(part)))

    def within(self, row_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of the rows in this rank's slice, int64 [m], and their places in the slice, int64 [m].

        A row is a state from which a token is predicted, and belongs to the rank that holds it; no row crosses ranks.
        """
        here = torch.nonzero((row_n >= self.start) & (row_n < self.start + self.size)).flatten()
        return here, row_n[here] - self.start

    def to_heads(self, q_SHd: torch.Tensor, k_SKd: torch.Tensor, v_SKd: torch.Tensor) -> list[torch.Tensor]:
        """Return queries [T, H / R, d], keys and values [T, K', d] of all tokens for this rank's heads. Collective.

        Keys and values are repeated until R divides their number, so that each rank has those of its queries.

        Raises:
            ValueError: R does not divide H.
        """
        if self.group is None:
            return [q_SHd, k_SKd, v_SKd]
        check_heads(q_SHd.shape[1], k_SKd.shape[1], self.ranks)
        repeat = self.ranks // math.gcd(k_SKd.shape[1], self.ranks)
        if repeat > 1:
            k_SKd, v_SKd = k_SKd.repeat_interleave(repeat, 1), v_SKd.repeat_interleave(repeat, 1)
        # All three go in one all-to-all: the parts for one rank lie end to end, [S, R, width].
        parts = [x.reshape(self.size, self.ranks, -1) for x in (q_SHd, k_SKd, v_SKd)]
        mixed = _AllToAll.apply(torch.cat(parts, 2).transpose(0, 1), self.group)
        # Slices in rank order are the pack, with its padding at the end.
        whole = mixed.flatten(0, 1)[: self.tokens].split([x.shape[2] for x in parts], 1)
        return [x.unflatten(1, (-1, y.shape[2])) for x, y in zip(whole, (q_SHd, k_SKd, v_SKd), strict=True)]

    def my_heads(self, x_H: torch.Tensor) -> torch.Tensor:
        """Return the part [H / R, ...] of this rank's query heads, as `to_heads` divides them."""
        heads = len(x_H) // self.ranks
        return x_H.narrow(0, self.start // self.size * heads, heads)

    def to_tokens(self, out_THd: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens: [T, H / R, d] -> [S, H, d]. Collective."""
        if self.group is None:
            return out_THd
        flat = F.pad(out_THd.flatten(1), (0, 0, 0, self.size * self.ranks - self.tokens))
        heads = _AllToAll.apply(flat.view(self.ranks, self.size, -1), self.group)
        return heads.transpose(0, 1).reshape(self.size, -1, out_THd.shape[2])

    def total(self, *parts_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply `total` over the group; without a group, return the tensors unchanged."""
        return parts_T if self.group is None else total(self.group, *parts_T)


def total(group: dist.ProcessGroup, *parts_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum tensors [T] that hold values on each rank's own rows and zeros elsewhere; the sum is exact. Collective.

    Every rank then computes the same loss from the same numbers, so the backward passes the gradient on unchanged.
    """
    return _Total.apply(group, *parts_T)


def check_heads(heads: int, kv_heads: int, sp: int) -> None:
    """Raise ValueError unless sp divides the query heads; key-value heads may have any number."""
    if heads % sp:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"--parallel.sp {sp}: must divide the model's {heads} attention heads ({kv_heads} of keys and values, any "
            f"number of which would do); sp could be {fits}"
        )


def check_model(folder: Path, trust_remote_code: bool, sp: int) -> None:
    """Apply `check_config` to the model in a HF folder, before any weights are read."""
    if sp > 1:
        from transformers import AutoConfig

        with plain_errors(folder):
            check_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), sp)


def check_config(config: Any, sp: int) -> None:
    """Raise ValueError unless the tokens of a model (a HF config) can be divided over sp ranks."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        kv_heads = getattr(config, "num_key_value_heads", None)
        check_heads(heads, kv_heads if isinstance(kv_heads, int) else heads, sp)
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    others = sorted(set(layers) - {"full_attention", "sliding_attention", "attention"})
    if others:
        raise ValueError(
            f"--parallel.sp {sp}: the model has layers of type {', '.join(others)}, which mix tokens in other ways "
            "than the attention that is divided here; set --parallel.sp 1"
        )
    moving = sorted(limits(config))
    if moving:
        raise ValueError(
            f"--parallel.sp {sp}: the model's rotary embedding is of type {', '.join(moving)}, whose frequencies "
            "depend on the longest position that a rank sees; set --parallel.sp 1"
        )


def check_same(batch: Batch, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Assert that all ranks of a sequence-parallel group hold the same sequences. Collective."""
    if group is None:
        return
    tokens, lengths = batch.token["tokens"], batch.lengths
    sums = [(x * torch.arange(1, len(x) + 1, device=x.device)).sum() for x in (tokens, lengths)]
    mine = torch.stack([*sums, lengths.sum(), batch.token["mask"].sum()]).to(device)
    ends = all_reduce(torch.stack([mine, -mine]), "max", group)
    assert torch.equal(ends[0], -ends[1]), "ranks of one sp group hold different sequences: see data/distribute.py"
