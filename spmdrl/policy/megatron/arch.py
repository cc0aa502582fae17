"""The description of a model in Megatron's terms, which `families.py` makes from a HF config.

Nothing here imports Megatron.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.policy.megatron.names import Names


@dataclass
class Architecture:
    """Description of one model, from which `model.py` builds it."""

    settings: dict
    """Keyword arguments of TransformerConfig; of MLATransformerConfig with `multi_latent_attention`."""
    names: Names
    vocab: int
    positions: int
    """Longest sequence."""
    tied: bool
    """True if the output head is the embedding."""
    rope_base: float
    rotary_share: float = 1.0
    """Share of each head, from its first channel on, that the rotary embedding rotates."""
    frequencies: torch.Tensor | None = None
    """Frequencies of the rotary embedding, float32 [rotated channels / 2]; None if they follow from `rope_base`."""
    softcap: float | None = None
    """Cap on attention scores."""
    embedding_scale: float | None = None
    """Factor on embeddings."""
    post_norms: bool = False
    """True if the outputs of attention and feed-forward are normed before they are added to the residual."""
    beside: str = ""
    """Prefix of checkpoint tensors that are saved without training: a vision tower."""


@dataclass(frozen=True)
class Family:
    """The settings and names in which one architecture differs from the common ones."""

    adapt: Callable[[Any, Architecture], None] = lambda h, a: None
    """Adds a family's settings: (HF config, architecture with the common settings), which it changes in place."""
    names: Names = field(default_factory=dict)
    partial_rotary: bool = False
    """True if the model applies `partial_rotary_factor`; other families of transformers ignore it."""
