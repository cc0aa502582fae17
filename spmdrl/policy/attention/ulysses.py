"""Sequence parallelism with all-to-all over heads (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Shapes: T packed tokens, R ranks of a sequence-parallel group, S = ceil(T / R) tokens per rank, H query heads, K
key-value heads, d head dimension. All ranks of the group have the same packed batch, and each one runs the transformer
on one slice of it. Only attention needs every token: an all-to-all before attention gives each rank all T tokens for
H / R heads, and an all-to-all after it restores the slices. The outputs are combined at the end, so losses see the
whole packed batch.
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
    """Sends block r of dimension 0 to rank r. The backward sends gradients back with the same operation."""

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
    """Sums over ranks. The backward is the identity: all ranks compute the same loss, so each has the full gradient."""

    @staticmethod
    def forward(ctx, group, *parts):
        return tuple(x.clone() for x in all_reduce(torch.stack(parts), "sum", group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, *grads


class TokenSlice:
    """This rank's slice of T packed tokens: the S tokens that begin at `start`. The last slices can end with padding.

    Without a group, the slice contains all tokens, and the methods do not communicate.
    """

    def __init__(self, tokens: int, group: dist.ProcessGroup | None = None):
        self.tokens, self.group = tokens, group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.size = -(-tokens // self.ranks)
        self.start = 0 if group is None else dist.get_group_rank(group, dist.get_rank()) * self.size

    def mine(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a tensor, [T, ...] -> [S, ...], with zeros on padding."""
        part = x_T[self.start : self.start + self.size]
        return F.pad(part, (0, 0) * (part.dim() - 1) + (0, self.size - len(part)))

    def within(self, row_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which elements of row_n are in this slice, and their positions in it, int64 [m] each.

        row_n: indices in [T] of hidden states. Each hidden state is used on the rank that computed it.
        """
        here = torch.nonzero((row_n >= self.start) & (row_n < self.start + self.size)).flatten()
        return here, row_n[here] - self.start

    def to_heads(self, q_SHd: torch.Tensor, k_SKd: torch.Tensor, v_SKd: torch.Tensor) -> list[torch.Tensor]:
        """Return queries [T, H / R, d], keys and values [T, K', d] of all tokens for this rank's heads. Collective.

        Key-value heads are repeated until their number is divisible by R, so that each rank gets the key-value heads
        that its query heads need.

        Raises:
            ValueError: H is not divisible by R.
        """
        if self.group is None:
            return [q_SHd, k_SKd, v_SKd]
        check_heads(q_SHd.shape[1], k_SKd.shape[1], self.ranks)
        repeat = self.ranks // math.gcd(k_SKd.shape[1], self.ranks)
        if repeat > 1:
            k_SKd, v_SKd = k_SKd.repeat_interleave(repeat, 1), v_SKd.repeat_interleave(repeat, 1)
        # Concatenate queries, keys and values per destination rank, [S, R, width], to use a single all-to-all.
        parts = [x.reshape(self.size, self.ranks, -1) for x in (q_SHd, k_SKd, v_SKd)]
        mixed = _AllToAll.apply(torch.cat(parts, 2).transpose(0, 1), self.group)
        # The slices of all ranks, concatenated, are the packed tokens followed by padding.
        whole = mixed.flatten(0, 1)[: self.tokens].split([x.shape[2] for x in parts], 1)
        return [x.unflatten(1, (-1, y.shape[2])) for x, y in zip(whole, (q_SHd, k_SKd, v_SKd), strict=True)]

    def my_heads(self, x_H: torch.Tensor) -> torch.Tensor:
        """Return the elements [H / R, ...] of x for this rank's query heads (`to_heads`)."""
        heads = len(x_H) // self.ranks
        return x_H.narrow(0, self.start // self.size * heads, heads)

    def to_tokens(self, out_THd: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`: return all heads for this rank's tokens, [T, H / R, d] -> [S, H, d]. Collective."""
        if self.group is None:
            return out_THd
        flat = F.pad(out_THd.flatten(1), (0, 0, 0, self.size * self.ranks - self.tokens))
        heads = _AllToAll.apply(flat.view(self.ranks, self.size, -1), self.group)
        return heads.transpose(0, 1).reshape(self.size, -1, out_THd.shape[2])

    def total(self, *parts_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum tensors over the group with `total`, or return them unchanged without a group."""
        return parts_T if self.group is None else total(self.group, *parts_T)


def total(group: dist.ProcessGroup, *parts_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum tensors [T] over ranks, where each rank has values at its own tokens and zeros elsewhere. Collective.

    The sum is exact. Every rank computes the same loss from it, so the backward passes gradients through unchanged.
    """
    return _Total.apply(group, *parts_T)


def check_heads(heads: int, kv_heads: int, sp: int) -> None:
    """Raise ValueError unless sp divides the number of query heads. The number of key-value heads does not matter."""
    if heads % sp:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"--parallel.sp {sp}: must divide the model's {heads} attention heads (the number of its key-value heads, "
            f"{kv_heads}, does not matter); sp could be {fits}"
        )


def check_model(folder: Path, trust_remote_code: bool, sp: int) -> None:
    """Apply `check_config` to the model in an HF folder if sp > 1, before any weights are read."""
    if sp > 1:
        from transformers import AutoConfig

        with plain_errors(folder):
            check_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), sp)


def check_config(config: Any, sp: int) -> None:
    """Raise ValueError unless the model supports sequence parallelism over sp ranks. config: an HF config."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        kv_heads = getattr(config, "num_key_value_heads", None)
        check_heads(heads, kv_heads if isinstance(kv_heads, int) else heads, sp)
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    others = sorted(set(layers) - {"full_attention", "sliding_attention", "attention"})
    if others:
        raise ValueError(
            f"--parallel.sp {sp}: the model has layers of type {', '.join(others)}, but only attention layers "
            "can be divided over ranks; set --parallel.sp 1"
        )
    moving = sorted(limits(config))
    if moving:
        raise ValueError(
            f"--parallel.sp {sp}: the model's rotary embedding is of type {', '.join(moving)}, whose frequencies "
            "depend on the longest position that a rank sees; set --parallel.sp 1"
        )


def check_same(batch: Batch, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Assert that all ranks of a sequence-parallel group have the same sequences. Collective."""
    if group is None:
        return
    tokens, lengths = batch.token["tokens"], batch.lengths
    marks = batch.token.get("image", tokens[:0])
    sums = [(x * torch.arange(1, len(x) + 1, device=x.device)).sum() for x in (tokens, lengths, marks)]
    mine = torch.stack([*sums, lengths.sum(), batch.token["mask"].sum()]).to(device)
    ends = all_reduce(torch.stack([mine, -mine]), "max", group)
    assert torch.equal(ends[0], -ends[1]), "ranks of one sp group have different sequences: see data/distribute.py"
