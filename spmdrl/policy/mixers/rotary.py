"""Runs rotary embeddings with length-dependent frequencies over packed batches.

transformers picks the frequencies once per forward pass, based on the largest position. `longrope` has one set of
frequencies up to the original context length and another set for longer sequences. `dynamic` has different frequencies
for every length above the original one. Here, each sequence in a packed batch gets the frequencies that it would get on
its own. Sequences with different frequencies cannot share a prefix, because the prefix would have different hidden
states.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from spmdrl.hub.rotary import grows, moves
from spmdrl.policy.attention.packing import Packing, active


@dataclass(frozen=True)
class Moving:
    """How the frequencies of a rotary embedding depend on the sequence length."""

    limit: int
    """Maximum sequence length in tokens that uses the original frequencies."""
    grows: bool
    """True if every length above `limit` has its own frequencies, False if all of them share one set."""

    def mark(self, length: int) -> int:
        """Return a number that identifies the set of frequencies for this length."""
        return 0 if length <= self.limit else length if self.grows else 1


def install(hf: nn.Module) -> list[Moving]:
    """Make the rotary embeddings of an HF model run over packed batches while a packing is `active`.

    Returns the embeddings whose frequencies depend on the length.
    """
    out = []
    for module in hf.modules():
        if not (moving := _moving(module)):
            continue
        out += moving.values()
        if getattr(module.forward, "func", None) is not _forward:
            module.forward = partial(_forward, module, module.forward, moving)
    return out


def alike(moving: list[Moving], lengths: list[int]) -> bool:
    """Return True if sequences with these lengths all use the same frequencies."""
    return all(len({rope.mark(length) for length in lengths}) == 1 for rope in moving)


def _moving(module: Any) -> dict[str | None, Moving]:
    """Return a module's length-dependent rotary embeddings by layer type; the key None stands for all layers."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    out = {}
    for layer, kind in kinds.items():
        if not moves(kind):
            continue
        if grows(kind):
            out[layer] = Moving(module.original_max_seq_len, True)
        else:
            settings = module.config.rope_parameters
            settings = settings if layer is None else settings[layer]
            out[layer] = Moving(settings["original_max_position_embeddings"], False)
    return out


def _forward(module: Any, forward: Any, moving: dict[str | None, Moving], x, position_ids, layer_type=None) -> Any:
    rope, packing = moving.get(layer_type), active()
    more = {} if layer_type is None else {"layer_type": layer_type}
    if rope is None or packing is None:
        return forward(x, position_ids, **more)
    groups, order = packing.layout(rope, lambda: _groups(rope, packing))
    parts = []
    for tokens in groups:
        if rope.grows:
            # The module keeps the frequencies of the longest sequence so far. Call it with position 0 to reset them.
            forward(x, position_ids[..., :1] * 0, **more)
        parts.append(forward(x, position_ids if len(groups) == 1 else position_ids[..., tokens], **more))
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(pair, -2).index_select(-2, order) for pair in zip(*parts, strict=True))


def _groups(rope: Moving, packing: Packing) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Group packed tokens, int64 [n] per group, by sequences with the same frequencies.

    Also returns the index of each token in the concatenated groups, int64 [T]. All results are in host memory.
    """
    if packing.roots < len(packing.lengths):
        # All sequences in a tree have the same frequencies (`alike`).
        groups = [torch.arange(sum(packing.lengths))]
    else:
        marks = torch.tensor([rope.mark(n) for n in packing.lengths]).repeat_interleave(torch.tensor(packing.lengths))
        groups = [torch.nonzero(marks == mark).flatten() for mark in marks.unique()]
    return groups, torch.argsort(torch.cat(groups))
