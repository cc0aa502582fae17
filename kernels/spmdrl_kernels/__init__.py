"""Computes log-probabilities, entropies and losses without storing the logits [T, V]. See kernels/README.md."""

from spmdrl_kernels.aligned import aligned_loss
from spmdrl_kernels.chunked import chunked_loss
from spmdrl_kernels.deferred import raise_deferred
from spmdrl_kernels.distill import distillation_loss
from spmdrl_kernels.linear import collision_probability, linear_logprob
from spmdrl_kernels.logits import token_logprob

__all__ = [
    "aligned_loss",
    "chunked_loss",
    "collision_probability",
    "distillation_loss",
    "linear_logprob",
    "raise_deferred",
    "token_logprob",
]
