"""Losses of given tokens, per token: from log p of each to its loss."""

from collections.abc import Callable

import torch


def nll(logp: torch.Tensor) -> torch.Tensor:
    """Cross-entropy: minus log p."""
    return -logp


def dft(logp: torch.Tensor) -> torch.Tensor:
    """Dynamic fine-tuning: cross-entropy times p, through which no gradient flows (https://arxiv.org/abs/2508.05629)."""
    return -logp.detach().exp() * logp


TOKEN_LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nll": nll, "dft": dft}
